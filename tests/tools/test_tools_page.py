"""Tests of docs/tools.md: its code runs, its recipes open, its commands parse."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.serve import command_line, objects_in
from agentfactory.tools.sessions.toolset import open_toolset

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_tools.py").write_text("\n".join(blocks("python")))
    return tmp_path


async def test_recipes(folder: Path) -> None:
    first, second = (ToolsRecipe.model_validate(yaml.safe_load(block)) for block in blocks("yaml"))
    async with open_toolset(first, folder) as toolset, toolset.chain("a", {}) as session:
        result = await session.call(ToolCall("1", "convert", {"amount": "26.2"}))
        assert result.content == "42.165"
    async with open_toolset(second, folder) as toolset, toolset.chain("a", {"goal": 3, "id": 7}) as session:
        assert session.opening == "Count up to 3."
        assert not (await session.call(ToolCall("1", "add", {"number": 2}))).finish
        result = await session.call(ToolCall("2", "add", {"number": 1}))
        assert (result.content, result.finish) == ("The counter stands at 3.", True)
        verdict = await session.reward()
        assert (verdict.reward, verdict.metrics) == (1.0, {"steps_left": 0.0})


async def test_the_other_tools(folder: Path) -> None:
    names = ("forecast", "plot", "submit")
    recipe = ToolsRecipe(tools=[f"my_tools.py:{name}" for name in names])
    wrong = {"trip": {"start": {}}, "day": "2026-11-21", "hours": 99}
    async with open_toolset(recipe, folder) as toolset, toolset.chain("a", {}) as session:
        assert (await session.call(ToolCall("1", "forecast", wrong))).content in PAGE
        drawn = await session.call(ToolCall("2", "plot", {"values": [0.1, 0.9]}))
        assert [part["type"] for part in drawn.content] == ["text", "image_url"]  # type: ignore[index]
        assert drawn.info == {"points": 2}
        handed_in = await session.call(ToolCall("3", "submit", {"answer": "42"}))
        assert (handed_in.content, handed_in.finish) == ("Handed in: 42", True)


def test_commands(folder: Path) -> None:
    lines = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("agentfactory tools serve")]
    assert len(lines) == 3
    for line in lines:
        for reference in command_line("serve").parse_args(line[3:]).objects:
            if reference.endswith(".py"):
                found = [thing.__name__ for thing in objects_in(folder / reference)]
                assert found == ["convert", "forecast", "plot", "submit", "Counter"]
            else:
                load_object(reference, folder)
