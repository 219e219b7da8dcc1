"""Fixtures that serve the objects of scratchpad.py over each transport."""

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.tools.environments import environment_host
from agentfactory.tools.mcp_servers import recipe_server as tool_server
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset

FOLDER = Path(__file__).parent
NOTEBOOK = {"command": "python", "args": ["-S", "notebook.py"]}
"""The `mcp_servers` entry of a program that starts quickly."""
ROLES = {"reset": "begin", "reward": "judge", "close": None}
"""The tools of that program, and of others, that make an environment of it."""
OBJECTS = [f"scratchpad.py:{name}" for name in ("Scratchpad", "add", "shout", "fail", "wait")]


@pytest.fixture
def folder() -> Path:
    return FOLDER


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise time limits, so that a slow machine neither empties gauges nor skips an instance's close()."""
    monkeypatch.setattr(tool_server, "_GAUGE_SECONDS", 60.0)
    monkeypatch.setattr(environment_host, "_CLOSE_SECONDS", 60.0)


def stdio_server(*objects: str, **fields: object) -> dict[str, object]:
    """The `mcp_servers` entry of a child that serves `objects`."""
    return {"command": "python", "args": ["-m", "agentfactory.tools.serve", *(objects or OBJECTS)], **fields}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen([sys.executable, *arguments], cwd=FOLDER, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:"), line
            yield process, line.split()[1]
        finally:
            process.terminate()


def recipe_of(**servers: Any) -> ToolsRecipe:
    return ToolsRecipe.model_validate({"mcp_servers": servers})


async def ask(session: ToolSession, name: str, /, **arguments: Any) -> str:
    result = await session.call(ToolCall("1", name, arguments))
    assert result.error is None, result
    return result.content


async def check_own_words(toolset: Toolset, chains: Iterable[int], **first: Any) -> None:
    """Assert that each of parallel chains finds nothing written, and then its own word. `first` goes to the first
    call."""

    async def live(number: int) -> tuple[str, str]:
        async with toolset.chain(str(number), {}) as session:
            found = await ask(session, "read", **first)
            await ask(session, "write", word=str(number))
            return found, await ask(session, "read")

    assert await asyncio.gather(*map(live, chains)) == [("nothing", str(number)) for number in chains]


@pytest.fixture(scope="session")
def http_url() -> Iterator[str]:
    with running("-m", "agentfactory.tools.serve", *OBJECTS, "--http", "0") as (_, url):
        yield url


@pytest.fixture
def recipes(http_url: str) -> dict[str, ToolsRecipe]:
    """Transport -> the recipe that serves the same tools over it."""
    servers = {"stdio": stdio_server(), "http": {"url": http_url}}
    return {
        "in process": ToolsRecipe(tools=OBJECTS),
        **{name: ToolsRecipe.model_validate({"mcp_servers": {"pad": given}}) for name, given in servers.items()},
    }
