"""`agentfactory worlds list | show | try`, on worlds of a file and on the installed ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentfactory.base.messages import ToolSpec
from agentfactory.commands.main import main
from agentfactory.worlds.commands.trial import RandomCalls
from tests.project import load_and_check

GARDEN = '''
import time
from agentfactory import Environment, finish, tool


class Garden(Environment):
    """Beds that need water.

    Args:
        pump: litres per second.
    """

    def __init__(self, pump: int = 2) -> None:
        self.pump = pump

    def reset(self, beds: int, **row) -> str:
        self.dry = beds
        return f"There are {beds} dry beds and a pump of {self.pump}."

    @tool
    def water(self, litres: int = 1):
        """Water a bed."""
        self.dry -= 1
        return finish("all wet") if not self.dry else f"{self.dry} are dry"

    def reward(self) -> dict:
        return {"reward": float(self.dry == 0), "wet": 1.0}


class Plain(Garden):
    def reset(self) -> str:
        return super().reset(1)


class HangsInTool(Plain):
    @tool
    def water(self) -> str:
        """Water a bed."""
        time.sleep(60)


class RaisesInTool(Plain):
    @tool
    def water(self) -> str:
        """Water a bed."""
        return {}["hose"]


class RaisesInReset(Plain):
    def reset(self) -> str:
        raise RuntimeError("no water")


class RaisesInReward(Plain):
    def reward(self) -> float:
        raise RuntimeError("no scales")


class Tells(Plain):
    @tool
    def water(self) -> str:
        """Water a bed."""
        raise ValueError("it is wet")


class Prints(Plain):
    @tool
    def water(self) -> str:
        """Water a bed."""
        print("splash")
        return "wet"
'''


Worlds = Callable[..., Any]


@pytest.fixture
def worlds(capsys: pytest.CaptureFixture[str]) -> Worlds:
    """`worlds(status, *arguments)` runs `agentfactory worlds ARGUMENTS`, which ends with `status`; it returns its
    output."""

    def run(status: int, *arguments: str) -> Any:
        assert main(["worlds", *arguments]) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def garden(tmp_path: Path) -> str:
    (tmp_path / "garden.py").write_text(GARDEN)
    return f"{tmp_path / 'garden.py'}:"


def test_an_episode_is_shown_turn_by_turn(garden: str, worlds: Worlds) -> None:
    row = json.dumps({"question": "Water every bed.", "beds": 2})
    shown = worlds(0, "try", f"{garden}Garden", "--row", row, "--option", "pump=7").out
    opening, first, last, reward = (
        shown.index(text) for text in ("2 dry beds and a pump of 7", "1 are dry", "all wet", "reward: reward 1, wet 1")
    )
    assert opening < shown.index("turn 1: water(") < first < shown.index("turn 2: water(") < last < reward
    assert "Water every bed." in shown
    assert "turn 3" not in shown


def test_calls_can_be_given(garden: str, tmp_path: Path, worlds: Worlds) -> None:
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"name": "water", "arguments": {"litres": 5}}\n{"name": "rain"}\n')
    row = '{"question": "?", "beds": 5}'
    shown = worlds(0, "try", f"{garden}Garden", "--row", row, "--calls", str(calls)).out
    assert "turn 1: water(litres=5)\n    4 are dry" in shown
    assert "turn 2: rain()\n    error (unknown_tool)" in shown
    assert "reward: reward 0" in shown
    calls.write_text('{"tool": "water"}')
    assert (
        f"--calls: {calls}, line 1: got "
        in worlds(2, "try", f"{garden}Garden", "--row", row, "--calls", str(calls)).err
    )


@pytest.mark.parametrize(
    ("world", "told"),
    [
        ("RaisesInTool", "RaisesInTool: water raised KeyError: 'hose'"),
        ("RaisesInReset", "environment RaisesInReset: reset: RuntimeError: no water"),
        ("RaisesInReward", "environment RaisesInReward: reward: RuntimeError: no scales"),
        ("Prints", "Prints prints to stdout, which breaks"),
    ],
)
def test_a_broken_world_is_named(world: str, told: str, garden: str, worlds: Worlds) -> None:
    assert told in worlds(1, "try", f"{garden}{world}", "--turns", "2").err


@pytest.mark.extended
def test_a_world_that_hangs_is_named(garden: str, worlds: Worlds) -> None:
    told = worlds(1, "try", f"{garden}HangsInTool", "--seconds", "2").err
    assert "HangsInTool: water hangs: no answer within --seconds 2" in told


def test_an_error_that_the_model_reads_is_no_fault(garden: str, worlds: Worlds) -> None:
    assert "error (tool_error): ValueError: it is wet" in worlds(0, "try", f"{garden}Tells", "--turns", "2").out


def test_missing_rows_are_told(garden: str, worlds: Worlds) -> None:
    told = worlds(2, "try", f"{garden}Garden").err
    assert 'Garden needs tasks with beds, and no task source has them; fix: give a row by --row \'{"beds"' in told
    assert "beds=2: " in worlds(2, "try", f"{garden}Garden", "beds=2").err
    assert "there is no world 'webshp'; fix: did you mean webshop?" in worlds(2, "try", "webshp").err


def test_a_recipe_can_be_tried(garden: str, tmp_path: Path, worlds: Worlds) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Water them.", "beds": 1}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("tools: ['garden.py:Garden']\ndata: {path: rows.jsonl}\nrollout: {system_prompt: You garden.}\n")
    shown = worlds(0, "try", str(recipe)).out
    assert "task 1 of 1" in shown
    assert "You garden." in shown
    assert "reward: reward 1" in shown


def test_a_world_is_shown(garden: str, worlds: Worlds) -> None:
    shown = worlds(0, "show", f"{garden}Garden").out
    for text in ("Beds that need water.", "water(litres: integer = 1)", "pump: int = 2\n        litres per second."):
        assert text in shown
    assert "its rows have question, beds" in shown
    assert "reward: its own" in shown


def test_installed_worlds_are_listed_with_what_is_missing(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfactory.base.user_code.extras.is_installed", lambda name: name != "html_to_markdown")
    entries = {(each["kind"], each["name"]): each for each in json.loads(worlds(0, "list", "--json").out)}
    browse = entries["world", "browse"]
    assert browse["needs"] == ["agentfactory-rl[browse]"]
    assert "html_to_markdown is not installed; fix: pip install 'agentfactory-rl[browse]'" in browse["missing"]
    assert entries["world", "image_tools"]["missing"] is None
    assert entries["world", "image_tools"]["package"].startswith("agentfactory-rl ")
    assert entries["tasks", "harbor"]["world"] == "harbor"
    assert all(each["about"] for each in entries.values() if each["missing"] is None)


@pytest.mark.parametrize("world", ["harbor", "search", "webshop"])
def test_the_shown_recipe_is_valid(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worlds: Worlds) -> None:
    monkeypatch.chdir(tmp_path)
    shown = yaml.safe_load(json.loads(worlds(0, "show", world, "--json").out)["recipe"])
    (tmp_path / "tasks.jsonl").write_text('{"question": "?", "goal": 1}\n')
    (tmp_path / "my_rewards.py").write_text(
        "from agentfactory import reward as mark\n\n\n@mark\ndef reward(prediction):\n    return 1.0\n"
    )
    # the values to fill in
    if world == "harbor":
        assert shown["data"]["harbor"] == {"folder": "..."}
        folder = Path(__file__).parents[2] / "recipes/harbor/tasks"
        shown["data"]["harbor"] = {"folder": str(folder), "images": {"ubuntu:24.04": "/"}}
    if world == "search":
        assert shown["mcp_servers"]["search"]["options"] == {"source": "..."}
        shown["mcp_servers"]["search"]["options"]["source"] = "http://127.0.0.1:1/retrieve"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(shown))
    loaded = load_and_check(recipe, ["server.engine=embedded"], "train", lacks=[])
    assert loaded.name == "recipe"


SCHEMAS = [
    {"properties": {"a": {"enum": ["x", "y"]}, "b": {"const": 3}}, "required": ["a", "b"]},
    {"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 5, "multipleOf": 2}}, "required": ["a"]},
    {"properties": {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 6}}, "required": ["a"]},
    {
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
        "required": ["a"],
    },
    {
        "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/p"}]}},
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
    {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_calls_fit_the_schema(schema: dict[str, object]) -> None:
    spec = ToolSpec("act", "", {"type": "object", **schema})
    drawn = []
    for seed in (1, 1, 2):
        calls = RandomCalls([spec], seed)
        calls.see("Go [up] or [down 2].")
        drawn.append([calls.draw() for _ in range(30)])
    for _, arguments in drawn[0] + drawn[2]:
        jsonschema.validate(arguments, spec.parameters)
    assert drawn[0] == drawn[1]
