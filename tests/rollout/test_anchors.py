"""Anchors of states, from an environment or any MCP server to trajectories and back."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.groups.group_files import append_group, read_groups
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from tests.scripted_chains import call, scripted_chains

WALK = '''
from agentfactory import Environment, reward, tool


class Walk(Environment):
    """A walk on a line. There is no state below 0."""

    def reset(self, start: int = 0, **task):
        self.here = start

    @tool
    def go(self, steps: int) -> str:
        """Go some steps."""
        self.here += steps
        return f"at {self.here}"

    @tool
    def jump(self) -> str:
        """Jump, and fall."""
        self.here += 1
        raise RuntimeError("fell")

    def anchor(self):
        return (self.here, "here") if self.here >= 0 else None

    def reward(self):
        return 1.0


class Weather(Environment):
    """The weather of a walk."""

    def reset(self, weather: str = "sun", **task):
        self.weather = weather

    def anchor(self):
        return self.weather


@reward
def one():
    return 1.0
'''

PARTS = '''
import sys
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

server = MCPServer("parts")
count = 0


@server.tool()
def take() -> CallToolResult:
    """Take a part."""
    global count
    count += 1
    meta = {"agentfactory/anchor": {"taken": count}}
    return CallToolResult(content=[TextContent(type="text", text="took")], _meta=meta)


@server.tool()
def look() -> str:
    """Look at the parts."""
    return f"{count} parts"


server.run()
'''


async def play(folder: Path, texts: list[str], task: dict[str, Any] | None = None, **fields: Any) -> Trajectory:
    fields = {"tools": ["notes.py:Walk"], "rewards": [], **fields}
    async with scripted_chains(folder, texts, source=WALK, **fields) as scripted:
        return await scripted.run(**(task or {}))


async def test_each_turn_has_the_state_before_it(tmp_path: Path) -> None:
    """A malformed turn, an unknown tool and invalid arguments change nothing. A tool that raises may have changed the
    state, which is unknown until the next call."""
    texts = [
        call("go", steps=2), "<tool_call>\n{", call("fly"), call("go", steps="far"), call("jump"), call("go", steps=-1),
        call("go", steps=-9), call("go", steps=10), "done",
    ]  # fmt: skip
    chain = await play(tmp_path, texts, {"start": 3}, rollout={"max_turns": 12})
    here = ['[3, "here"]', *['[5, "here"]'] * 4, None, '[5, "here"]', None, '[6, "here"]']
    assert (chain.outcome, chain.turns, chain.anchors) == (Outcome.COMPLETED, 9, here)


async def test_calls_of_one_turn_leave_the_state_of_the_last(tmp_path: Path) -> None:
    chain = await play(tmp_path, [call("go", steps=1) + "\n" + call("go", steps=1), "done"])
    assert chain.anchors == ['[0, "here"]', '[2, "here"]']


async def test_several_environments_have_a_state_together(tmp_path: Path) -> None:
    tools = ["notes.py:Walk", "notes.py:Weather"]
    texts = [call("go", steps=1), call("go", steps=-5), "done"]
    chain = await play(tmp_path, texts, tools=tools)
    # the second is a text in a list of texts; a state without an anchor has none together with the others
    assert chain.anchors == [json.dumps([f'[{step}, "here"]', "sun"]) for step in (0, 1)] + [None]
    only = await play(tmp_path, ["done"], tools=["notes.py:Weather"], rewards=["notes.py:one"])
    assert only.anchors == ["sun"]


@pytest.mark.processes
async def test_any_server_can_give_anchors(tmp_path: Path) -> None:
    """A third-party server gives its first anchor with its first call's result; results without one change nothing."""
    (tmp_path / "parts.py").write_text(PARTS)
    server = {"parts": {"command": "python", "args": ["parts.py"]}}
    texts = [call("look"), call("take"), call("look"), call("take"), "done"]
    chain = await play(tmp_path, texts, tools=[], mcp_servers=server, rewards=["notes.py:one"])
    assert chain.anchors == [None, None, '{"taken": 1}', '{"taken": 1}', '{"taken": 2}']


def test_groups_keep_them(tmp_path: Path) -> None:
    with_anchors = Trajectory("a", [], [], Outcome.COMPLETED, 1.0, turns=2, anchors=["[1, 2]", None])
    group = Group("g", {}, [with_anchors, Trajectory("b", [], [], Outcome.COMPLETED, 0.0)])
    append_group(tmp_path / "train.jsonl", group)
    assert list(read_groups(tmp_path / "train.jsonl")) == [group]
    # lines from before there were anchors
    line = json.loads((tmp_path / "train.jsonl").read_text())
    for chain in line["trajectories"]:
        del chain["anchors"]
    (tmp_path / "old.jsonl").write_text(json.dumps(line) + "\n")
    (old,) = read_groups(tmp_path / "old.jsonl")
    assert [chain.anchors for chain in old.trajectories] == [[], []]
    line["trajectories"][0]["anchors"] = ["[1, 2]"]
    (tmp_path / "wrong.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="chain a has 2 turns and 1 anchors"):
        list(read_groups(tmp_path / "wrong.jsonl"))
