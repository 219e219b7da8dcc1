"""Tests of results that are far too large: cut on arrival over every transport, so that the worker's memory is
bounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import CallError, ToolCall, ToolResult
from agentfactory.base.run_notices import Notice, notice_of
from agentfactory.tools.calls.truncation import cut_bytes
from agentfactory.tools.sessions.toolset import open_toolset
from tests.tools.conftest import running

pytestmark = pytest.mark.processes

SIZE = 3_000_000
"""More than 1 MiB: shorter texts always pass a transport's filter."""
MOST = 1000
TEXT = "word " * (SIZE // 5)
SERVED = f"""
from agentfactory import Environment, tool
from mcp.server.mcpserver import Image, MCPServer

TEXT = "word " * {SIZE // 5}


@tool
def text() -> str:
    "Return a great deal."
    return TEXT


@tool
async def items() -> dict:
    "Return a great deal of JSON."
    return {{"items": list(range(400_000))}}


@tool
def fails() -> str:
    "Raise a great deal."
    raise RuntimeError(TEXT)


class World(Environment):
    def reset(self, **task):
        return TEXT

    @tool
    def look(self) -> str:
        "Look."
        return TEXT

    @tool
    def info(self) -> dict:
        "Return what the model does not see."
        return {{"observation": "seen", "file": "A" * 2_000_000}}

    @tool
    def far_too_much_info(self) -> dict:
        "Return too much that the model does not see."
        return {{"observation": "seen", "file": "A" * 20_000_000}}


theirs = MCPServer("theirs")


@theirs.tool(name="text")
def their_text() -> str:
    "Return a great deal, as text and as JSON."
    return TEXT


@theirs.tool()
def picture():
    "A large picture."
    return Image(data=b"0" * 16_000_000, format="png")


@theirs.tool()
def small_picture():
    "A picture of more than 1 MiB."
    return Image(data=b"0" * 1_500_000, format="png")


@theirs.tool(name="items")
def their_items() -> dict[str, list[int]]:
    "Return a great deal of JSON."
    return {{"items": list(range(400_000))}}


if __name__ == "__main__":
    import sys, uvicorn, socket
    if len(sys.argv) == 1:
        theirs.run("stdio")
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        print(f"ready http://127.0.0.1:{{listener.getsockname()[1]}}/mcp", flush=True)
        app = theirs.streamable_http_app(json_response=sys.argv[1] == "json")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "served.py").write_text(SERVED)
    return tmp_path


@contextmanager
def recipe_of(way: str, folder: Path) -> Iterator[ToolsRecipe]:
    own = {"tools": [f"served.py:{name}" for name in ("text", "items", "fails", "World")]}
    if way == "own over stdio":
        arguments = ["-m", "agentfactory.tools.serve", *own["tools"]]
        own = {"mcp_servers": {"own": {"command": "python", "args": arguments}}}  # type: ignore[dict-item]
    theirs: dict[str, Any] = {
        "in process": {"module": "served.py:theirs"},
        "stdio": {"command": "python", "args": ["served.py"]},
    }
    limits = {"result_bytes": MOST}
    if way.startswith("own"):
        yield ToolsRecipe.model_validate({**own, "limits": limits})
    elif way in theirs:
        yield ToolsRecipe.model_validate({"mcp_servers": {"theirs": theirs[way]}, "limits": limits})
    else:
        with running(str(folder / "served.py"), way) as (_, url):
            yield ToolsRecipe.model_validate({"mcp_servers": {"theirs": {"url": url}}, "limits": limits})


async def call(session: Any, name: str) -> ToolResult:
    return await session.call(ToolCall("1", name, {}))


@pytest.mark.parametrize("way", ["own", pytest.param("own over stdio", marks=pytest.mark.extended)])
async def test_our_own_servers(way: str, served: Path) -> None:
    expected = cut_bytes(TEXT, MOST)
    with recipe_of(way, served) as recipe:
        async with open_toolset(recipe, served) as toolset, toolset.chain("a", {}) as session:
            assert session.opening == expected
            assert session.left_out == {"World" if way == "own" else "own": SIZE - MOST}
            for name in ("text", "look"):
                result = await call(session, name)
                assert (result.content, result.error, result.left_out) == (expected, None, SIZE - MOST)
            failed = await call(session, "fails")
            assert failed.error is CallError.TOOL_ERROR
            assert str(failed.content).startswith("RuntimeError: word word")
            assert len(str(failed.content)) < MOST + 80
            assert failed.left_out > SIZE - MOST
            items = await call(session, "items")
            assert str(items.content).startswith('{"items": [0, 1, 2, 3')
            assert items.left_out > 2_000_000
            assert (await call(session, "info")).info == {"file": "A" * 2_000_000}
            far = await call(session, "far_too_much_info")
            assert (far.error, far.info) == (CallError.TOOL_ERROR, {})
            assert "The result is too large: it has" in str(far.content)


@pytest.mark.extended
@pytest.mark.parametrize("way", ["in process", "stdio", "json", "events"])
async def test_servers_of_other_people(way: str, served: Path) -> None:
    with recipe_of(way, served) as recipe:
        async with open_toolset(recipe, served) as toolset, toolset.chain("a", {}) as session:
            result = await call(session, "text")
            assert (result.content, result.left_out) == (cut_bytes(TEXT, MOST), SIZE - MOST)
            for name in ("picture",) if way == "in process" else ("picture", "items"):
                result = await call(session, name)
                assert result.error is CallError.TOOL_ERROR
                assert "The result is too large: it" in str(result.content)
            small = await call(session, "small_picture")
            assert small.error is None
            assert len(small.content[0]["image_url"]["url"]) > 1_999_000  # type: ignore[index]
            assert (await call(session, "text")).left_out, "the connection is as good as before"


async def test_a_cut_result_is_told_of_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.scripted_chains import scripted_chains

    source = """
from agentfactory import reward, tool


@tool
def note(text: str) -> str:
    "Take a note."
    return text * 1000


@reward
def turns(trajectory):
    return 1.0
"""
    turn = '<tool_call>\n{"name": "note", "arguments": {"text": "word "}}\n</tool_call>'
    limits = {"result_bytes": 100}
    async with scripted_chains(tmp_path, [turn, turn, "done"], source=source, limits=limits) as scripted:
        trajectory = await scripted.run()
        said = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert said == [cut_bytes("word " * 1000, 100)] * 2
        assert trajectory.metrics["limits/result_bytes"] == 2
    notices = [notice for record in caplog.records if (notice := notice_of(record))]
    text = "tool note: a result exceeded limits.result_bytes by 4,900 bytes and was truncated"
    assert notices == [Notice("tool note is cut", text)] * 2
