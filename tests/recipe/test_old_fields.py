"""Recipes of version 0.1 load, mean the same, and are told what to write now."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.recipe.composition import resolve_saved
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.old_fields import CHOICES, GONE, MOVED, renew
from agentfactory.recipe.reference import sections
from agentfactory.recipe.schema import Recipe
from agentfactory.tools.config import Choice
from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import GaeOptions
from benchmarks.settings import options, settings

SAVED = Path(__file__).with_name("recipe_of_0_1.yaml")


def leaves(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, dict) and data:
        return {name: leaf for key, value in data.items() for name, leaf in leaves(value, f"{path}.{key}").items()}
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


def test_a_saved_recipe_means_the_same(tmp_path: Path) -> None:
    saved = yaml.safe_load(SAVED.read_text())
    recipe = Recipe.model_validate_json(json.dumps(resolve_saved(saved, tmp_path)), strict=True)
    now, before = leaves(recipe.model_dump(mode="json")), leaves(saved)
    assert now["train.loss.options.clip_low"] == 0.001
    assert now["train.loss.options.clip_high"] == 4e-4
    assert now["train.loss.mismatch.options.low"] == 0.25
    assert now["train.loss.mismatch.options.high"] == 2.0
    assert now["train.gradient_checkpointing"] == "offload"
    assert now["train.optimizer.learning_rates.embed"] == 1e-6
    assert now["rollout.context.options.prompt"] == "Sum up."
    assert now["rollout.curriculum"] == 0.5
    assert now["server.options.args"] == ["--enforce-eager"]
    assert now["mcp_servers.time.command"] == "/usr/bin/python3"
    changed = {"output", "train.gradient_checkpointing"}
    kept = {name: value for name, value in before.items() if name in now and name not in changed}
    assert len(kept) > 130
    assert {name: now[name] for name in kept} == kept
    # options that the estimator and the loss do not have had their defaults, and are left out
    assert not [name for name in now if name.endswith("_temperature") or "critic" in name]
    moved = set(MOVED) | set(GONE) | {"rollout.curriculum", "train.activation_offload", "train.vision_learning_rate"}
    moved |= {"train.optimizer.groups", "mcp_servers.time.type", "train.advantage.options", "train.loss.options"}
    assert {name for name in before if name not in now and not name.startswith(tuple(moved))} == set()


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_field_keeps_its_value(old: str) -> None:
    value = "another value"
    data = nested(old, value)
    with pytest.warns(FutureWarning, match=f"recipe.yaml: .*write {MOVED[old]} instead of {old}"):
        renew(data, "recipe.yaml")
    assert data == nested(MOVED[old], value)


def test_every_new_name_is_a_field_of_today() -> None:
    known = {**settings(Recipe), **options(Recipe)}.values()
    assert {new for new in MOVED.values() if new not in known} == set()
    assert {old for old in (*MOVED, *GONE) if old in known} == set()


def test_every_choice_is_known() -> None:
    found = ((path, section) for section, paths in sections(Recipe).items() for path in paths)
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


@pytest.mark.parametrize(
    ("given", "wanted", "told"),
    [
        ({"rollout": {"agent": {"outside": {}}}}, {"rollout": {"agent": {"name": "outside", "options": {}}}}, "out"),
        ({"rollout": {"agent": {"outside": None, "command": ["x"]}}}, {"rollout": {"agent": {"command": ["x"]}}}, None),
        ({"rollout": {"curriculum": {"solved": 0.8}}}, {"rollout": {"curriculum": 0.25}}, "0.05 and 0.95"),
        ({"train": {"vision_learning_rate": 1e-6}}, {"train": {"vision": 1e-6}}, "train.vision: 1e-06"),
        ({"train": {"vision": "frozen", "vision_learning_rate": None}}, {"train": {"vision": "frozen"}}, None),
        ({"train": {"activation_offload": False}}, {}, None),
        ({"server": {"max_loras": 4}}, {}, None),
        ({"server": {"max_loras": 9, "port": 1}}, {"server": {"port": 1}}, "nothing for server.max_loras"),
        ({"server": {"engine": "embedded", "args": [], "python": None}}, {"server": {"engine": "embedded"}}, None),
        ({"server": "none", "rollout": None, "train": []}, {"server": "none", "rollout": None, "train": []}, None),
    ],
)  # fmt: skip
def test_fields_of_another_form(given: dict[str, Any], wanted: dict[str, Any], told: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        renew(given, "recipe.yaml")
    assert given == wanted
    assert [told in str(warning.message) for warning in caught if told] == ([] if told is None else [True])


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
    assert len(settings(Recipe)) <= 164
    assert len(options(Recipe)) <= 35
