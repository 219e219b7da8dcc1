"""Connections: how they open, die and come back."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import http_server, stdio_server
from tools import mcp_client
from tools.config import ToolsRecipe
from tools.messages import ToolCall, ToolInfrastructureError
from tools.toolset import ToolSession, open_toolset


def recipe_of(**servers: Any) -> ToolsRecipe:
    return ToolsRecipe.model_validate({"mcp_servers": servers})


async def ask(session: ToolSession, name: str, /, **arguments: Any) -> str:
    result = await session.call(ToolCall("1", name, arguments))
    assert result.error is None, result
    return result.content


async def test_a_killed_child_fails_its_chains_and_comes_back(folder: Path) -> None:
    log: list[dict[str, Any]] = []
    async with open_toolset(recipe_of(pad=stdio_server()), folder, log.append) as toolset:
        async with toolset.chain("old", {"word": "old"}) as old, toolset.chain("too", {"word": "too"}) as too:
            process = int(await ask(old, "process_id"))
            calls = [asyncio.create_task(ask(session, "wait", seconds=30)) for session in (old, too)]
            await asyncio.sleep(0.1)
            os.kill(process, signal.SIGKILL)
            for call in calls:
                with pytest.raises(ToolInfrastructureError, match="tool server pad died during a call of wait"):
                    await call
            with pytest.raises(ToolInfrastructureError, match="pad was restarted and lost this chain's state"):
                await ask(old, "read")

        async with toolset.chain("new", {"word": "new"}) as new:
            assert await ask(new, "read") == "new"
            again = int(await ask(new, "process_id"))
            assert again != process

        os.kill(again, signal.SIGKILL)  # while nobody calls
        while log[-1]["event"] != "tool_server_lost":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with toolset.chain("newer", {"word": "newer"}) as newer:
            assert await ask(newer, "read") == "newer"
    assert [record["event"] for record in log] == ["tool_server_opened", "tool_server_lost"] * 2 + [
        "tool_server_opened"
    ]


async def test_a_server_that_keeps_dying_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_client, "REOPEN_DELAYS", (0.0, 0.0, 0.0))
    recipe = recipe_of(pad=stdio_server("scratchpad.py:die"))
    async with open_toolset(recipe, folder) as toolset, toolset.chain("a", {}) as session:
        for _ in range(3):
            with pytest.raises(ToolInfrastructureError, match="died during a call of die"):
                await ask(session, "die")
        with pytest.raises(
            ToolInfrastructureError, match=r"tool server pad: given up after 3 failures: `.*tools\.serve"
        ):
            await ask(session, "die")


async def test_a_dead_http_server(folder: Path) -> None:
    with http_server() as (process, url):
        async with open_toolset(recipe_of(pad={"url": url}), folder) as toolset:
            async with toolset.chain("old", {"word": "old"}) as old:
                call = asyncio.create_task(ask(old, "wait", seconds=30))
                await asyncio.sleep(0.1)
                process.kill()
                with pytest.raises(ToolInfrastructureError, match="tool server pad died during a call of wait"):
                    await call
            process.wait()
            port = int(url.split(":")[2].split("/")[0])
            with http_server(port=port) as (again, _):
                async with toolset.chain("new", {"word": "new"}) as new:
                    assert await ask(new, "read") == "new"
                    again.kill()
                    again.wait()
                    with pytest.raises(ToolInfrastructureError, match="pad died"):
                        await ask(new, "read")
                lost = pytest.raises(ToolInfrastructureError, match=r"lost this chain's state|no state of this chain")
                with http_server(port=port), lost:
                    await ask(new, "read")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (
            {"command": "python", "args": ["-c", "import sys; sys.exit('no key for you')"]},
            r"tool server bad: `.*python.* -c .*exit.*` in .*Connection closed; the end of its stderr:\nno key for you",
        ),
        (
            {"command": "python", "args": ["-P", "-m", "tools.serve", "scratchpad.py:sub"]},
            "scratchpad.py defines no sub",
        ),
        ({"command": "no-such-program", "args": ["x"]}, "`no-such-program x` in .*No such file"),
        (
            {"command": "python", "args": ["-c", "import time; time.sleep(60)"], "timeout_seconds": 0.5},
            r"no answer within 0.5 s \(timeout_seconds\)",
        ),
        ({"url": "http://127.0.0.1:1/mcp"}, "tool server bad: http://127.0.0.1:1/mcp: ConnectError"),
    ],
)
async def test_servers_that_do_not_start(folder: Path, server: dict[str, Any], reason: str) -> None:
    with pytest.raises(ToolInfrastructureError, match=reason):
        async with open_toolset(recipe_of(good={"module": "scratchpad.py:add"}, bad=server), folder):
            pass


async def test_an_http_server_that_speaks_something_else(folder: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, family=socket.AF_INET) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ToolInfrastructureError, match=rf"127.0.0.1:{port}/: MCPError: .*text/html"):
            async with open_toolset(recipe_of(bad={"url": f"http://127.0.0.1:{port}/"}), folder):
                pass


MINE = """
import os
from tools.tool import tool

@tool
def look(name: str) -> str:
    return str(os.environ.get(name))
"""


async def test_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text("raise RuntimeError('a module of the user took our place')\n")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("SECRET", "hush")
    monkeypatch.setenv("OTHER", "not passed on")
    server = stdio_server("mine.py:look", env={"TOKEN": "Bearer ${SECRET}!", "PLAIN": "$SECRET"})
    log: list[dict[str, Any]] = []
    async with open_toolset(recipe_of(mine=server), tmp_path, log.append) as toolset, toolset.chain("a", {}) as session:
        seen = [await ask(session, "look", name=name) for name in ("TOKEN", "PLAIN", "OTHER")]
    assert seen == ["Bearer hush!", "$SECRET", "None"]
    assert "hush" not in str(log)
