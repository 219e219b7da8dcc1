"""Sections that choose a component by name."""

from pathlib import Path
from typing import Any

from agentfactory.base.config import Choice
from agentfactory.recipe.choices import CHOICES
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe
from docs.reference_pages import sections
from tests.project import refused


def test_every_choice_is_known() -> None:
    found = ((path, name) for name, paths in sections(Recipe).items() for path in paths if ".sources." not in path)
    assert {path: section for path, section in found if issubclass(section, Choice)} == CHOICES


def extended(section: str, override: str) -> Any:
    """The project's recipe with a section, and an override of it."""
    Path("extended.yaml").write_text(f"extends: recipe.yaml\n{section}\n")
    return load_recipe("extended.yaml", [override])


def test_options_of_one_source_stay_in_any_order(project: Path) -> None:
    (project / "mine.py").write_text("def one(logprob, tau=1.0): ...\ndef two(logprob, tau=1.0): ...\n")
    given = ["train.loss.options.tau=0.7", "train.loss.policy=mine.py:one"]
    for overrides in (given, given[::-1]):
        assert load_recipe("recipe.yaml", overrides).train.loss.options == {"tau": 0.7}
    given = ["server.options.args=[x]", "server.engine=embedded"]
    for overrides in (given, given[::-1]):
        refused(r"vllm or sglang has it, and server\.engine is embedded", *overrides)
    recipe = extended("train: {loss: {policy: mine.py:one, options: {tau: 0.9}}}", "train.loss.policy=mine.py:two")
    assert recipe.train.loss.options == {"tau": 0.9}


def test_an_agents_name_alone_can_be_extended(project: Path) -> None:
    recipe = extended("rollout: {agent: outside}", "rollout.agent.options.port=8123")
    assert recipe.rollout.agent.options.port == 8123
    refused(r"rollout\.agent\.name: got", "rollout.agent={name: [x], env: {A: b}}")


def test_another_choice_drops_the_options_of_the_earlier_one(project: Path) -> None:
    gspo = "train: {loss: {policy: gspo, options: {clip_high: 0.5, dual_clip: 3}}}"
    assert extended(gspo, "train.loss.policy=cispo").train.loss.options.model_dump() == {"clip_high": 0.5}
    told = r"dual_clip: .*clip or gspo has it, and train\.loss\.policy is cispo"
    refused(told, "train.loss={policy: cispo, options: {dual_clip: 3}}", path="extended.yaml")
