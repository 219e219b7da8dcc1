"""A world from another package's wheel, by its name in a recipe: its tool, its tasks and its command."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

GARDEN = '''
from typing import ClassVar

from agentfactory import Environment, TaskSource, tool


class Garden(Environment):
    """Beds that need water."""

    def reset(self, beds: int) -> str:
        self.dry = beds
        return f"There are {beds} dry beds."

    @tool
    def water(self) -> str:
        """Water a bed."""
        self.dry -= 1
        return f"{self.dry} are dry"

    def reward(self) -> float:
        return float(self.dry == 0)


class Plots(TaskSource):
    """Gardens that grow."""

    world = "garden"
    paths: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """File with a number of beds per line."""

    def rows(self) -> list[dict]:
        lines = open(self.file).read().split()
        return [{"question": "Water every bed.", "beds": int(beds)} for beds in lines]
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


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for Python's path into which pip has installed the wheel."""
    info = "gardens-1.0.dist-info"
    points = "[agentfactory.worlds]\ngarden = garden:Garden\n[agentfactory.sources]\nplots = garden:Plots\n"
    files = {
        "garden.py": GARDEN,
        "beds.py": COMMAND,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: gardens\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"{points}[agentfactory.commands]\nbeds = beds\n",
    }
    wheel = tmp_path / "gardens-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            archive.writestr(name, text)
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel]
    subprocess.run(pip, check=True)
    return target


@pytest.fixture
def agentfactory(installed: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """The command, with the wheel."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "agentfactory", *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True)

    return run


def test_a_recipe_names_a_world_of_another_package(
    installed: Path, tmp_path: Path, agentfactory: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    (tmp_path / "task").mkdir()
    recipe = tmp_path / "task" / "recipe.yaml"
    recipe.write_text(RECIPE)
    (tmp_path / "task" / "plots.txt").write_text("1\n2\n")
    listed = agentfactory("tools", "list", str(recipe), "--json")
    assert [each["function"]["name"] for each in json.loads(listed.stdout)] == ["water"]
    checked = agentfactory("tools", "check", str(recipe))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "There are 1 dry beds." in checked.stdout
    assert "0 are dry" in agentfactory("tools", "call", str(recipe), "water").stdout
    assert agentfactory("beds", str(tmp_path / "task" / "plots.txt")).stdout == "3\n"
    assert "count the beds of a garden" in agentfactory("--help").stdout

    # the message gives any error that its rows raise
    (tmp_path / "task" / "plots.txt").write_text("one")
    told = agentfactory("tools", "check", str(recipe)).stderr
    assert "data.plots: Plots.rows failed: ValueError: " in told
    assert "garden.py, line " in told
    # its fields are checked as ours are
    recipe.write_text(RECIPE.replace("file:", "fle:"))
    told = agentfactory("tools", "check", str(recipe)).stderr
    assert "data.plots.fle: unknown key 'fle'; fix: did you mean data.plots.file?" in told
    recipe.write_text(RECIPE.replace("garden", "gardn"))
    assert (
        "'gardn' is not prebuilt (alfworld, browse, calculator, code_interpreter, garden, "
        in agentfactory("tools", "check", str(recipe)).stderr
    )


def test_tasks_bring_the_world_that_plays_them(
    installed: Path, tmp_path: Path, agentfactory: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    (tmp_path / "plots.txt").write_text("1\n2\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {plots: {file: plots.txt}}\n")
    checked = agentfactory("tools", "check", str(recipe))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "There are 1 dry beds." in checked.stdout
    recipe.write_text("data: {plots: {file: plots.txt}}\nmcp_servers: {beds: {module: garden}}\n")
    listed = agentfactory("tools", "list", str(recipe), "--json")
    assert [each["function"]["name"] for each in json.loads(listed.stdout)] == ["water"]


@pytest.mark.parametrize(
    ("group", "name", "told"),
    [
        ("worlds", "webshop", "two packages register 'webshop' in agentfactory.worlds: "),
        ("sources", "limit", "data: an installed package registers the source 'limit', which is already a"),
        (
            "worlds",
            "shell",
            "other:Shop is registered as 'shell' in agentfactory.worlds, and AgentFactory has a tool of this name",
        ),
    ],
)
def test_a_name_that_is_taken_is_an_error(
    group: str,
    name: str,
    told: str,
    installed: Path,
    tmp_path: Path,
    agentfactory: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    other = installed / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text(f"[agentfactory.{group}]\n{name} = other:Shop\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"tools: [{name}]\n" if group == "worlds" else "tools: [calculator]\ndata: {path: rows.jsonl}\n")
    done = agentfactory("tools", "list", str(recipe))
    assert done.returncode == 2
    assert told in done.stderr
    assert "; fix: uninstall " in done.stderr


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("beds", "raise RuntimeError('no water')", "RuntimeError('no water')"),
        ("beds", "", "AttributeError(\"module 'beds' has no attribute 'ABOUT'\")"),
        ("train", COMMAND, "ValueError('AgentFactory has a command of this name')"),
    ],
)
def test_a_command_that_cannot_be_added_leaves_the_others(
    name: str,
    source: str,
    told: str,
    installed: Path,
    tmp_path: Path,
    agentfactory: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    (installed / "beds.py").write_text(source)
    points = installed / "gardens-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text().replace("beds = beds", f"{name} = beds"))
    done = agentfactory("index", "serve", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"agentfactory: the command {name} cannot be loaded: beds: {told}\n")
    # reported once, before the command's own error
    assert done.stderr.count("cannot be loaded") == 1
    assert "none" in done.stderr
