"""Recipes of version 0.1 load, mean the same, and are told what to write now."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.config import Choice
from agentfactory.base.errors import SettingError
from agentfactory.recipe.choices import CHOICES
from agentfactory.recipe.composition import leaves, resolve_saved
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.old_fields import MOVED, renew
from agentfactory.recipe.reference import sections
from agentfactory.recipe.schema import Recipe
from agentfactory.trainers.config import GaeOptions
from benchmarks.settings import options, settings

SAVED = Path(__file__).with_name("recipe_of_0_1.yaml")


def flat(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, dict) and data:
        return {name: leaf for key, value in data.items() for name, leaf in flat(value, f"{path}.{key}").items()}
    return {path.removeprefix("."): data}


def value_of(data: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        data = data[key]
    return data


def nested(path: str, value: Any) -> dict[str, Any]:
    *keys, last = path.split(".")
    data: dict[str, Any] = {last: value}
    for key in reversed(keys):
        data = {key: data}
    return data


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def test_a_saved_recipe_means_the_same(tmp_path: Path) -> None:
    saved = yaml.safe_load(SAVED.read_text())
    recipe = Recipe.model_validate_json(json.dumps(resolve_saved(saved, tmp_path)), strict=True)
    now, before = flat(recipe.model_dump(mode="json")), flat(saved)
    assert now["train.loss.options.clip_low"] == 0.001
    assert now["train.loss.options.clip_high"] == 4e-4
    assert now["train.loss.mismatch.options.low"] == 0.25
    assert now["train.loss.mismatch.options.high"] == 2.0
    assert now["train.gradient_checkpointing"] == "offload"
    assert now["rollout.context.options.prompt"] == "Sum up."
    assert now["rollout.curriculum.visit"] == 0.5
    assert now["server.options.args"] == ["--enforce-eager"]
    assert now["mcp_servers.time.command"] == "/usr/bin/python3"
    changed = {"output", "train.gradient_checkpointing"}
    kept = {name: value for name, value in before.items() if name in now and name not in changed}
    assert len(kept) > 130
    assert {name: now[name] for name in kept} == kept
    # options that the estimator and the loss do not have had their defaults, and are left out
    assert not [name for name in now if name.endswith("_temperature") or "critic" in name]
    moved = set(MOVED) | {"server.max_loras", "train.activation_offload", "train.vision_learning_rate"}
    moved |= {
        "mcp_servers.time.type",
        "train.advantage.options",
        "train.loss.options",
        "mcp_servers.time.pool.max_seconds",
    }
    assert {name for name in before if name not in now and not name.startswith(tuple(moved))} == set()


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_field_keeps_its_value(old: str) -> None:
    path, _, name = MOVED[old].partition(".options.")
    section = CHOICES[path]
    choice = next(choice for choice, kind in section.kinds.items() if name in kind.model_fields)
    chosen = nested(f"{path}.{section.chooser}", choice) if choice != "command" else nested(f"{path}.command", ["x"])
    data = merged(nested(old, "another"), chosen)
    with pytest.warns(FutureWarning, match=f"recipe.yaml: .*write {MOVED[old]} instead of {old}"):
        renew(data, {old: "recipe.yaml"})
    assert data == merged(nested(MOVED[old], "another"), chosen, *([{"train": {}}] if "critic" in old else []))


def test_every_new_name_is_a_field_of_today() -> None:
    known = {**settings(Recipe), **options(Recipe)}.values()
    assert {new for new in MOVED.values() if new not in known} == set()
    assert {old for old in MOVED if old in known} == set()


def test_every_choice_is_known() -> None:
    found = (
        (path, section) for section, paths in sections(Recipe).items() for path in paths if ".sources." not in path
    )
    assert {path: section for path, section in found if issubclass(section, Choice)} == CHOICES


def test_recipe_files_and_the_command_line_are_told(project: Path) -> None:
    (project / "old.yaml").write_text("extends: recipe.yaml\ntrain: {algorithm: ppo, critic: {learning_rate: 2e-3}}\n")
    with pytest.warns(FutureWarning) as told:
        recipe = load_recipe("old.yaml", ["train.critic.value_clip=0.5"])
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe.train.advantage.options, GaeOptions)
    assert recipe.train.advantage.options.critic_learning_rate == 2e-3
    assert recipe.train.advantage.options.value_clip == 0.5
    assert [str(warning.message) for warning in told] == [
        "old.yaml: fields have changed: write train.advantage.options.critic_learning_rate instead of "
        "train.critic.learning_rate",
        "command line: fields have changed: write train.advantage.options.value_clip instead of "
        "train.critic.value_clip",
    ]


OUTSIDE = {"rollout": {"agent": {"name": "outside", "options": {"port": 1}}}}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "outside": ({"rollout": {"agent": {"outside": {"port": 1}}}}, OUTSIDE, "name: outside"),
    "no outside": ({"rollout": {"agent": {"outside": None, "name": "a"}}}, {"rollout": {"agent": {"name": "a"}}}, None),
    "vision": (
        {"train": {"vision": "trained", "vision_learning_rate": 1e-6}},
        {"train": {"vision": 1e-6}},
        "train.vision: 1e-06",
    ),
    "no rate": ({"train": {"vision": "frozen", "vision_learning_rate": None}}, {"train": {"vision": "frozen"}}, None),
    "offload": (
        {"train": {"gradient_checkpointing": True, "activation_offload": True}},
        {"train": {"gradient_checkpointing": "offload"}},
        "offload instead",
    ),
    "no offload": ({"train": {"activation_offload": False}}, {"train": {}}, None),
    "usual adapters": ({"server": {"max_loras": 4}}, {"server": {}}, None),
    "adapters": ({"server": {"max_loras": 9, "port": 1}}, {"server": {"port": 1}}, "nothing for server.max_loras"),
    "defaults of another engine": (
        {"server": {"engine": "embedded", "args": [], "python": None}},
        {"server": {"engine": "embedded"}},
        None,
    ),
    "no critic": ({"train": {"critic": {}}}, {"train": {}}, None),
    "no sections": ({"server": "none", "rollout": None}, {"server": "none", "rollout": None}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_fields_of_another_form(case: str) -> None:
    given, wanted, told = copy.deepcopy(FORMS[case])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        renew(given, dict.fromkeys(leaves(given), "recipe.yaml"))
    assert given == wanted
    assert [told in str(warning.message) for warning in caught if told] == ([] if told is None else [True])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"train": {"loss": {"clip_low": 0.1, "options": {"clip_low": 0.3}}}}, "train.loss.clip_low"),
        ({"rollout": {"agent": {"outside": {}, "name": "mine.py:A"}}}, "rollout.agent.outside"),
        ({"train": {"activation_offload": True}}, "train.activation_offload"),
        ({"train": {"activation_offload": "please"}}, "train.activation_offload"),
        ({"train": {"vision": "frozen", "vision_learning_rate": 1e-6}}, "train.vision_learning_rate"),
        ({"train": {"vision": "trained", "vision_learning_rate": True}}, "train.vision_learning_rate"),
        ({"server": {"max_loras": "banana"}}, "server.max_loras"),
    ],
)
def test_what_no_field_of_today_means_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        renew(given, dict.fromkeys(leaves(given), "recipe.yaml"))
    assert caught.value.field == field
    assert caught.value.fix


def test_the_later_recipe_wins_under_both_names(project: Path) -> None:
    (project / "old.yaml").write_text("extends: recipe.yaml\ntrain: {loss: {clip_low: 0.3}}\n")
    (project / "new.yaml").write_text("extends: old.yaml\ntrain: {loss: {options: {clip_low: 0.1}}}\n")
    (project / "older.yaml").write_text("extends: new.yaml\ntrain: {loss: {clip_low: 0.2}}\n")
    for name, wanted in (("old", 0.3), ("new", 0.1), ("older", 0.2)):
        recipe = load_recipe(f"{name}.yaml")
        assert isinstance(recipe, Recipe)
        assert recipe.train.loss.options.clip_low == wanted


def test_a_later_rate_of_the_tower_wins(project: Path) -> None:
    (project / "old.yaml").write_text("extends: recipe.yaml\ntrain: {vision: trained, vision_learning_rate: 1e-6}\n")
    (project / "new.yaml").write_text("extends: old.yaml\ntrain: {vision: 2e-6}\n")
    for overrides, wanted in (([], 2e-6), (["train.vision_learning_rate=3e-6"], 3e-6)):
        recipe = load_recipe("new.yaml", overrides)
        assert isinstance(recipe, Recipe)
        assert recipe.train.vision == wanted


def test_defaults_under_old_names_fit_every_choice(project: Path) -> None:
    """A recipe that another one extends may have any engine and estimator."""
    overrides = ["server.tensor_parallel_size=1", "server.python=null", "rollout.context.keep_turns=2"]
    assert load_recipe("recipe.yaml", [*overrides, "train.critic.learning_rate=1e-5", "train.critic={}"])


def test_options_of_one_source_stay_in_any_order(project: Path) -> None:
    (project / "mine.py").write_text("def one(logprob, tau=1.0): ...\ndef two(logprob, tau=1.0): ...\n")
    given = ["train.loss.options.tau=0.7", "train.loss.policy=mine.py:one"]
    for overrides in (given, given[::-1]):
        recipe = load_recipe("recipe.yaml", overrides)
        assert isinstance(recipe, Recipe)
        assert recipe.train.loss.options == {"tau": 0.7}
    for overrides in (
        ["server.options.args=[x]", "server.engine=embedded"],
        ["server.engine=embedded", "server.options.args=[x]"],
    ):
        with pytest.raises(SettingError, match=r"vllm or sglang has it, and server\.engine is embedded"):
            load_recipe("recipe.yaml", overrides)
    (project / "own.yaml").write_text(
        "extends: recipe.yaml\ntrain: {loss: {policy: mine.py:one, options: {tau: 0.9}}}\n"
    )
    recipe = load_recipe("own.yaml", ["train.loss.policy=mine.py:two"])
    assert isinstance(recipe, Recipe)
    assert recipe.train.loss.options == {"tau": 0.9}


def test_another_algorithm_drops_the_options_too(project: Path) -> None:
    (project / "ppo.yaml").write_text(
        "extends: recipe.yaml\ntrain: {algorithm: ppo, advantage: {options: {critic_learning_rate: 1e-3}}}\n"
    )
    recipe = load_recipe("ppo.yaml", ["train.algorithm=grpo"])
    assert isinstance(recipe, Recipe)
    assert recipe.train.advantage.options.model_dump() == {"scale": "group"}
    with pytest.raises(SettingError, match=r"train\.algorithm: got 'pppo'"):
        load_recipe("ppo.yaml", ["train.algorithm=pppo"])


def test_an_agents_name_alone_can_be_extended(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFACTORY_TOKEN", "for tests")
    (project / "agent.yaml").write_text("extends: recipe.yaml\nrollout: {agent: outside}\n")
    recipe = load_recipe("agent.yaml", ["rollout.agent.options.port=8123"])
    assert isinstance(recipe, Recipe)
    assert recipe.rollout.agent is not None
    assert recipe.rollout.agent.options.port == 8123
    with pytest.raises(SettingError, match=r"rollout\.agent\.name: got"):
        load_recipe("recipe.yaml", ["rollout.agent={name: [x], env: {A: b}}"])


def test_another_choice_drops_the_options_of_the_earlier_one(project: Path) -> None:
    (project / "sapo.yaml").write_text(
        "extends: recipe.yaml\ntrain: {loss: {policy: gspo, options: {clip_high: 0.5, dual_clip: 3}}}\n"
    )
    recipe = load_recipe("sapo.yaml", ["train.loss.policy=cispo"])
    assert isinstance(recipe, Recipe)
    assert recipe.train.loss.options.model_dump() == {"clip_high": 0.5}
    with pytest.raises(SettingError, match=r"dual_clip: .*clip or gspo has it, and train\.loss\.policy is cispo"):
        load_recipe("sapo.yaml", ["train.loss={policy: cispo, options: {dual_clip: 3}}"])


def test_the_number_of_settings_does_not_grow_unseen() -> None:
    """Whoever adds a field asks first whether it belongs to the options of one choice, and which field may go."""
    assert len(settings(Recipe)) <= 186
    assert len(options(Recipe)) <= 43
