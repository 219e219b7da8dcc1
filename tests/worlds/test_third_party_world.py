"""A world from another package, by its name in a recipe: its tool, its tasks and its command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import agentfactory
from agentfactory.base.user_code.entry_points import registered
from agentfactory.commands.main import main
from tests.worlds.test_openenv import GARDEN

WITH_PLOTS = f'''{GARDEN}

from typing import ClassVar

from agentfactory import TaskSource


class Plots(TaskSource):
    """Gardens that grow."""

    world = "garden"
    paths: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """File with a number of beds per line."""

    def rows(self) -> list[dict]:
        lines = open(self.file).read().split()
        return [dict(question="Water every bed.", beds=int(beds)) for beds in lines]
'''
COMMAND = """
ABOUT = "count the beds of a garden"
EXAMPLES = ["beds plots.txt"]

def add_options(parser):
    parser.add_argument("file")

def run(options, say):
    say(str(sum(map(int, open(options.file).read().split()))))
"""
RECIPE = "tools: [garden]\ndata: {plots: {file: plots.txt}}\n"


POINTS = """[agentfactory.worlds]
garden = garden:Garden
[agentfactory.sources]
plots = garden:Plots
[agentfactory.commands]
beds = beds
"""

Run = Callable[..., tuple[int, str, str]]


def install(folder: Path, package: str, points: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    registered.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path with the package."""
    folder = tmp_path / "installed"
    install(folder, "gardens", POINTS)
    (folder / "garden.py").write_text(WITH_PLOTS)
    (folder / "beds.py").write_text(COMMAND)
    (tmp_path / "plots.txt").write_text("1\n2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    yield folder
    registered.cache_clear()
    for module in ("garden", "beds"):
        sys.modules.pop(module, None)


@pytest.fixture
def run(installed: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, on a recipe of this text."""

    def main_on(recipe: str, *arguments: str) -> tuple[int, str, str]:
        Path("recipe.yaml").write_text(recipe)
        status = main([*arguments])
        return status, *capsys.readouterr()

    return main_on


@pytest.fixture
def own_process(installed: Path) -> Run:
    """The command in a process of its own: one that has run other recipes can keep what it knew of packages."""

    def command_on(recipe: str, *arguments: str) -> tuple[int, str, str]:
        Path("recipe.yaml").write_text(recipe)
        command = [sys.executable, "-m", "agentfactory", *arguments]
        paths = os.pathsep.join([str(installed), str(Path(agentfactory.__file__).parents[1])])
        ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
        return ended.returncode, ended.stdout, ended.stderr

    return command_on


@pytest.mark.processes
def test_a_recipe_names_a_world_of_another_package(own_process: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run = own_process
    check = ("tools", "check", "recipe.yaml")
    _, listed, told = run(RECIPE, "tools", "list", "recipe.yaml", "--json")
    assert listed, told
    assert [each["function"]["name"] for each in json.loads(listed)] == ["water"]
    status, checked, told = run(RECIPE, *check)
    assert status == 0, checked + told
    assert "There are 1 dry beds." in checked
    assert "all wet" in run(RECIPE, "tools", "call", "recipe.yaml", "water")[1]
    assert run(RECIPE, "beds", "plots.txt")[1] == "3\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "count the beds of a garden" in capsys.readouterr().out
    # tasks bring the world that plays them
    status, checked, told = run("data: {plots: {file: plots.txt}}\n", *check)
    assert (status, "There are 1 dry beds." in checked) == (0, True), checked + told
    # its fields are checked as ours are, and the message gives any error that its rows raise
    told = run(RECIPE.replace("file:", "fle:"), *check)[2]
    assert "data.plots.fle: unknown key 'fle'; fix: did you mean data.plots.file?" in told
    told = run(RECIPE.replace("garden", "gardn"), *check)[2]
    assert "'gardn' is not prebuilt (alfworld, browse, calculator, code_interpreter, garden, " in told
    Path("plots.txt").write_text("one")
    told = run(RECIPE, *check)[2]
    assert "data.plots: Plots.rows failed: ValueError: " in told
    assert "garden.py, line " in told


@pytest.mark.parametrize(
    ("group", "name", "told"),
    [
        ("sources", "limit", "data: an installed package registers the source 'limit', which is already a"),
        (
            "worlds",
            "shell",
            "other:Shop is registered as 'shell' in agentfactory.worlds, and AgentFactory has a tool of this name",
        ),
    ],
)
def test_a_name_that_is_taken_is_an_error(group: str, name: str, told: str, installed: Path, run: Run) -> None:
    install(installed, "other", f"[agentfactory.{group}]\n{name} = other:Shop\n")
    recipe = f"tools: [{name}]\n" if group == "worlds" else "tools: [calculator]\ndata: {path: rows.jsonl}\n"
    status, _, err = run(recipe, "tools", "list", "recipe.yaml")
    assert (status, told in err, "; fix: uninstall " in err) == (2, True, True), err
