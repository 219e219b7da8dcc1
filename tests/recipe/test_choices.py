"""Sections that choose a component by name, and the number of settings."""

from pathlib import Path

import pytest

from agentfactory.base.config import Choice
from agentfactory.base.errors import SettingError
from agentfactory.recipe.choices import CHOICES
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.reference import sections
from agentfactory.recipe.schema import Recipe
from benchmarks.settings import options, settings


def test_every_choice_is_known() -> None:
    found = (
        (path, section) for section, paths in sections(Recipe).items() for path in paths if ".sources." not in path
    )
    assert {path: section for path, section in found if issubclass(section, Choice)} == CHOICES


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
    assert len(settings(Recipe)) <= 182
    assert len(options(Recipe)) <= 36
