"""Tests of `python -m agentfactory.tools.serve`: its command line, and that it never outlives its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from agentfactory.base.user_code.loading import UserCodeError
from agentfactory.tools.calls.mcp_results import content_of
from agentfactory.tools.mcp_servers.own_server import CHAIN_KEY
from agentfactory.tools.serve import main, objects_in

PARENT = """
import asyncio, sys
from pathlib import Path
from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import open_toolset

block = {"command": "python", "args": ["-m", "agentfactory.tools.serve", "scratchpad.py:block"]}
recipe = ToolsRecipe.model_validate({"mcp_servers": {"block": block}})

async def main():
    async with open_toolset(recipe, Path(sys.argv[1])) as toolset:
        async with toolset.chain("a", {}) as session:
            blocking = Path(sys.argv[2])
            stuck = asyncio.create_task(session.call(ToolCall("1", "block", {"path": str(blocking)})))
            while not blocking.exists():
                await asyncio.sleep(0.01)
            print("ready", flush=True)
            await stuck

asyncio.run(main())
"""


@pytest.mark.processes
def test_a_child_that_blocks_ends_when_its_parent_is_killed(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(folder), str(tmp_path / "blocking")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 1
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "the following arguments are required: FILE.py[:NAME]"),
        ("nothing", "'nothing' is not prebuilt (alfworld, browse, calculator, "),
        ("scratchpad.py:Scratchpad --capacity 0", "--capacity: Input should be greater than 0, got 0"),
        ("scratchpad.py:Scratchpad --option size", "--option: got 'size'; write it as NAME=VALUE"),
        ("scratchpad.py:Scratchpad --idle-seconds 3", "--idle-seconds: needs --http, because a stdio server"),
    ],
)
def test_command_lines_that_are_wrong(
    folder: Path, arguments: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(arguments.split(), prog="agentfactory tools serve")
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert reason in " ".join(said.err.split())
    assert said.err.startswith("usage: agentfactory tools serve ")
    assert said.out == ""


SHOP = """
from mcp.server.mcpserver import MCPServer
from agentfactory.tools.environments.environment import Environment
from agentfactory import tool

class Prices:
    @tool
    def price(self, item: str) -> int:
        return len(item)

class Shop(Environment):
    def __init__(self, owner: str, shelves: int = 1) -> None:
        self.owner, self.shelves, self.served = owner, shelves, 0

    def reset(self, **task) -> str:
        self.served += 1
        return f"{self.owner} {self.shelves} {self.served}"

    @tool
    def buy(self, item: str) -> str:
        return item

price = Prices().price
cost = price

@tool
def greet(name: str) -> str:
    return f"Hello {name}!"

@tool
def _private(name: str) -> str:
    return name
"""


def test_what_is_served_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    assert [found.__name__ for found in objects_in(tmp_path / "shop.py")] == ["Shop", "price", "greet"]
    (tmp_path / "server.py").write_text("from mcp.server.mcpserver import MCPServer\nmine = MCPServer('mine')\n")
    assert [found.name for found in objects_in(tmp_path / "server.py")] == ["mine"]
    (tmp_path / "empty.py").write_text("from agentfactory.tools.environments.environment import Environment\n")
    with pytest.raises(UserCodeError, match=r"empty.py has no @tool function, no Environment class and no MCP server"):
        objects_in(tmp_path / "empty.py")
    with pytest.raises(UserCodeError, match="there is no file"):
        objects_in(tmp_path / "missing.py")


@pytest.mark.processes
async def test_a_whole_file_over_stdio(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    options = ["--option", "owner=Ada", "--option", "shelves=3", "--max-uses", "2", "--capacity", "1"]
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "agentfactory.tools.serve", "shop.py", *options], cwd=tmp_path
    )
    async with Client(stdio_client(command)) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["buy", "reset", "close", "gauges", "price", "greet"]
        assert content_of(await client.call_tool("greet", {"name": "Ada"})) == "Hello Ada!"
        assert content_of(await client.call_tool("price", {"item": "tea"})) == "3"
        for chain, opening in (("a", "Ada 3 1"), ("b", "Ada 3 2"), ("c", "Ada 3 1")):
            meta: Any = {CHAIN_KEY: chain}
            assert content_of(await client.call_tool("reset", {}, meta=meta)) == opening
            await client.call_tool("close", {}, meta=meta)


def test_stdout_belongs_to_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud.py").write_text(
        "from agentfactory import tool\n\nprint('while loading')\n\n@tool\ndef talk() -> str:\n    return 'x'\n"
    )
    monkeypatch.setattr("agentfactory.tools.serve.serve_stdio", lambda server: None)
    main([f"{tmp_path}/loud.py:talk"])
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "while loading\n")
