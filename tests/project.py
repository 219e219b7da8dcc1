"""Recipes on disk, and the command as a user runs it."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Purpose
from tests.forked import COMMAND, Forked

TOOLS = '''
from agentfactory import Environment, reward, tool


@tool
def search(query: str) -> str:
    """Look something up."""
    return query


@reward
def exact(prediction: str, answer: str) -> float:
    return float(prediction == answer)


class World(Environment):
    def reset(self, answer, size=3):
        self.answer = answer

    def reward(self):
        return 1.0


class Place(World):
    def anchor(self):
        return self.answer


def plain():
    return 1
'''

RECIPE = """
model: {path: model, dtype: float32}
data: {path: tasks.jsonl}
eval: {data: {path: heldout.jsonl}}
tools: [my_tools.py:search]
rewards: [my_tools.py:exact]
server: {engine: embedded}
train: {steps: 10, learning_rate: 1e-5}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `recipe.yaml` and all the files that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("tasks.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def load_and_check(
    path: Path | str = "recipe.yaml",
    overrides: Sequence[str] = (),
    purpose: Purpose = "train",
    lacks: list[SettingError] | None = None,
) -> Any:
    """Load and check a recipe, as each command does."""
    recipe = load_recipe(path, overrides, purpose)
    check_recipe(recipe, purpose, lacks)
    return recipe


def refused(told: str, *overrides: str, path: Path | str = "recipe.yaml", **more: Any) -> SettingError:
    """Return the error, which says `told` (a regular expression), about a recipe with these overrides."""
    with pytest.raises(SettingError, match=told) as caught:
        load_and_check(path, overrides, **more)
    return caught.value


Command = Callable[..., subprocess.CompletedProcess[str]]


def run_command(said: Path, *arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `agentfactory ARGUMENTS` in the current folder, as a process that writes to the empty folder `said`. Assert
    that it ends with `status`, if one is given."""
    log, errors = said / "stdout", said / "stderr"
    ended = Forked(COMMAND, *arguments, log=log, errors=errors).wait()
    result = subprocess.CompletedProcess(arguments, ended, log.read_text(), errors.read_text())
    assert status in (None, ended), result
    return result


@pytest.fixture
def agentfactory(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A function that runs `agentfactory ARGUMENTS` in the current folder, as a process; see run_command."""
    return lambda *arguments, **options: run_command(tmp_path_factory.mktemp("said"), *arguments, **options)
