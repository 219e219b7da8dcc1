"""Settings that do not fit an agent with a loop of its own are refused when the recipe is loaded."""

from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe

OUTSIDE = "rollout.agent={name: outside, options: {port: 8100}}"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFACTORY_TOKEN", "for tests")


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        ([OUTSIDE, "rollout.workers=2"], "rollout.workers", "outside programs take tasks at one address; fix: use 1"),
        (["rollout.agent=outside", "rollout.workers=2"], "rollout.workers", "at one address"),
        (
            ["rollout.agent={name: outside, options: {workspace: desk}}"],
            "rollout.agent.options.workspace",
            "remove it: command has it, and rollout.agent.name is outside",
        ),
        (["rollout.agent={name: outside, command: [x]}"], "rollout.agent", "set one of name and command"),
        (
            ["rollout.agent={command: [x], options: {sandbox: none, disk_mb: 9}}"],
            "rollout.agent.options.disk_mb",
            "with sandbox=none",
        ),
        (["rollout.agent={command: [x], options: {processes: 1}}"], "rollout.agent.options.processes", "change it"),
    ],
)
def test_refused(project: Path, overrides: list[str], field: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


def test_a_program_without_a_sandbox_is_one_in_every_process_of_a_run(project: Path) -> None:
    recipe = load_recipe("recipe.yaml", ["rollout.agent={command: [ls], options: {sandbox: none}}"], purpose="train")
    assert isinstance(recipe, Recipe)
    # as the launcher, the trainer and the worker pass it on
    assert Recipe.model_validate(recipe.model_dump(mode="json")).rollout.agent == recipe.rollout.agent


def test_programs_outside_may_report_the_reward(project: Path) -> None:
    with pytest.raises(SettingError, match="reward"):
        load_recipe("recipe.yaml", ["rewards=[]"], purpose="train")
    load_recipe("recipe.yaml", [OUTSIDE, "rewards=[]", "rollout.workers=1"], purpose="train")
    # each worker starts programs of its own
    command = "rollout.agent={command: [ls]}"
    load_recipe("recipe.yaml", [command, "rollout.workers=2", "train.batch_size=2"], purpose="train")
