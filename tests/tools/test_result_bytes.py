"""Tests of results that are far too large: cut on arrival over every transport, so that the worker's memory is
bounded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import LimitsConfig, ToolsRecipe
from agentfactory.base.messages import CallError, ToolCall, ToolResult
from agentfactory.tools.calls.truncation import cut_bytes
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from tests.tools.roughness.raw_server import message_of
from tests.tools.roughness.serving import http_server, opened, plan_of, tool_of

pytestmark = pytest.mark.processes

SIZE = 3_000_000
"""More than 1 MiB: shorter texts always pass a transport's filter."""
MOST = 1000
TEXT = "word " * (SIZE // 5)
SERVED = f"""
from agentfactory import Environment, tool

TEXT = "word " * {SIZE // 5}


@tool
def text() -> str:
    return TEXT


@tool
def fails() -> str:
    raise RuntimeError(TEXT)


class World(Environment):
    def reset(self, **task):
        return TEXT

    @tool
    def look(self) -> str:
        return TEXT

    @tool
    def info(self) -> dict:
        return {{"observation": "seen", "file": "A" * 2_000_000}}

    @tool
    def far_too_much_info(self) -> dict:
        return {{"observation": "seen", "file": "A" * 20_000_000}}
"""


async def call(session: Any, name: str) -> ToolResult:
    return await session.call(ToolCall("1", name, {}))


async def test_our_own_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitsConfig, "result_bytes", MOST)
    expected = cut_bytes(TEXT, MOST)
    (tmp_path / "served.py").write_text(SERVED)
    tools = [f"served.py:{name}" for name in ("text", "fails", "World")]
    recipe = ToolsRecipe.model_validate({"tools": tools})
    async with open_toolset(recipe, tmp_path) as toolset, toolset.chain("a", {}) as session:
        assert session.opening == expected
        assert session.left_out == {"World": SIZE - MOST}
        for name in ("text", "look"):
            result = await call(session, name)
            assert (result.content, result.error, result.left_out) == (expected, None, SIZE - MOST)
        failed = await call(session, "fails")
        assert failed.error is CallError.TOOL_ERROR
        assert str(failed.content).startswith("RuntimeError: word word")
        assert len(str(failed.content)) < MOST + 80
        assert failed.left_out > SIZE - MOST
        assert (await call(session, "info")).info == {"file": "A" * 2_000_000}
        far = await call(session, "far_too_much_info")
        assert (far.error, far.info) == (CallError.TOOL_ERROR, {})
        assert "The result is too large: it has" in str(far.content)


ANSWERS: dict[str, dict[str, Any]] = {
    "text": {"content": [{"type": "text", "text": TEXT}]},
    "picture": {"content": [{"type": "image", "data": "A" * 21_000_000, "mimeType": "image/png"}]},
    "small_picture": {"content": [{"type": "image", "data": "A" * 2_000_000, "mimeType": "image/png"}]},
    "items": {"content": [], "structuredContent": {"items": list(range(400_000))}},
}


@asynccontextmanager
async def others(way: str, folder: Path) -> AsyncIterator[Toolset]:
    """Open a server whose tool `t` returns the answer that its argument names."""
    texts = {name: message_of(result=result) for name, result in ANSWERS.items()}
    if way == "stdio":
        tools = [tool_of(name, {"type": "object"}) for name in texts]
        async with opened(plan_of(tools, texts), result_bytes=MOST) as (toolset, _):
            yield toolset
        return

    def reply(message: dict[str, Any]) -> tuple[str, list[str], str]:
        body = texts[message["params"]["arguments"]["name"]].replace('"$ID"', str(message["id"]))
        body = f"event: message\ndata: {body}\n\n" if way == "text/event-stream" else body
        return "200 OK", [f"Content-Type: {way}"], body

    async with http_server(reply) as url:
        fields = {"mcp_servers": {"far": {"url": url}}}
        async with open_toolset(ToolsRecipe.model_validate(fields), folder) as toolset:
            yield toolset


@pytest.mark.parametrize("way", ["stdio", "application/json", "text/event-stream"])
async def test_servers_of_other_people(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitsConfig, "result_bytes", MOST)
    async with others(way, tmp_path) as toolset, toolset.chain("a", {}) as session:

        async def ask(name: str) -> ToolResult:
            return await session.call(ToolCall("1", name if way == "stdio" else "t", {"name": name}))

        result = await ask("text")
        assert (result.content, result.left_out) == (cut_bytes(TEXT, MOST), SIZE - MOST)
        for name in ("picture", "items"):
            result = await ask(name)
            assert result.error is CallError.TOOL_ERROR
            assert "The result is too large: it" in str(result.content)
        small = await ask("small_picture")
        assert small.error is None
        assert len(small.content[0]["image_url"]["url"]) > 1_999_000  # type: ignore[index]
        assert (await ask("text")).left_out, "the connection is as good as before"
