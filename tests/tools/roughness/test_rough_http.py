"""Tests of what HTTP servers, and gateways before them, answer; of lists of tools that change; and of slow openings."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError
from agentfactory.tools.mcp_servers import server_connection
from agentfactory.tools.sessions.toolset import open_toolset
from tests.tools.roughness.raw_server import message_of
from tests.tools.roughness.serving import http_server, opened, plan_of, tool_of
from tests.waiting import until


def _recipe(url: str, **fields: Any) -> ToolsRecipe:
    return ToolsRecipe.model_validate({"mcp_servers": {"far": {"url": url, "timeout_seconds": 5.0, **fields}}})


JSON, HTML = ["Content-Type: application/json"], ["Content-Type: text/html"]
DENIED = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "who are you?"}})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "headers", "body", "named"),
    [
        ("401 Unauthorized", ["WWW-Authenticate: Bearer"], "", "HTTP 401 Unauthorized, it needs a key: set `headers`"),
        ("403 Forbidden", JSON, DENIED, "HTTP 403 Forbidden, it needs a key: set `headers` of its entry: who are you?"),
        ("429 Too Many Requests", ["Retry-After: 30"], "slow", "HTTP 429 Too Many Requests, Retry-After: 30: slow"),
        ("200 OK", HTML, "<p>log in", "HTTP 200 OK with the content type text/html instead of JSON: <p>log in"),
        ("202 Accepted", [], "", "HTTP 202 Accepted, which announces no answer"),
    ],
)
async def test_refusals_are_named(status: str, headers: list[str], body: str, named: str) -> None:
    async with (
        http_server(lambda message: (status, headers, body)) as url,
        open_toolset(_recipe(url), Path("/")) as toolset,
        toolset.chain("a", {}) as session,
    ):
        with pytest.raises(ToolInfrastructureError) as raised:
            await session.call(ToolCall("1", "t", {}))
    assert str(raised.value).startswith("tool server far, call of t: HTTP ")
    assert named in str(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "path", "named"),
    [
        ("404 Not Found", "", "no MCP server at this path: .* often ends with /mcp"),
        ("405 Method Not Allowed", "sse", "no MCP server at this path: .* transport SSE is not supported"),
        ("401 Unauthorized", "mcp", "the key in `headers` is refused"),
    ],
)
async def test_what_refuses_every_request_is_named_when_the_server_opens(status: str, path: str, named: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{path}"
        with pytest.raises(ToolInfrastructureError, match=f"HTTP {status}, {named}"):
            async with open_toolset(_recipe(url, headers={"Authorization": "Bearer old"}), Path("/")):
                pass


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "kind", "text", "reads", "error"),
    [
        ("200 OK", "application/json", r'{"text": "cut \ud83d"}', "cut \ufffd", None),
        ("200 OK", "text/event-stream", r'{"text": "cut \ud83d"}', "cut \ufffd", None),
        ("500 Oops", "application/json", None, "backend down", CallError.TOOL_ERROR),
        ("404 Not", "application/json", None, "backend down", CallError.TOOL_ERROR),
    ],
)
async def test_answers_over_http(status: str, kind: str, text: str | None, reads: str, error: CallError | None) -> None:
    def reply(message: dict[str, Any]) -> tuple[str, list[str], str]:
        body = message_of(error={"code": -32000, "message": "backend down"})
        if text is not None:
            block = text.replace("{", '{"type": "text", ', 1)
            body = '{"jsonrpc": "2.0", "id": "$ID", "result": {"content": [%s]}}' % block  # noqa: UP031
        body = body.replace('"$ID"', str(message["id"]))
        return status, [f"Content-Type: {kind}"], f"event: message\ndata: {body}\n\n" if "stream" in kind else body

    async with (
        http_server(reply) as url,
        open_toolset(_recipe(url), Path("/")) as toolset,
        toolset.chain("a", {}) as session,
    ):
        result = await session.call(ToolCall("1", "t", {}))
        assert (result.content, result.error) == (reads, error)


@pytest.mark.processes
async def test_a_server_without_sessions_is_refused() -> None:
    reason = r"tool server far: .*gives its clients no sessions \(Mcp-Session-Id\); use isolation: shared"
    async with http_server(lambda message: ("200 OK", [], ""), session=False) as url:
        with pytest.raises(ToolInfrastructureError, match=reason):
            async with open_toolset(_recipe(url, isolation="session"), Path("/")):
                pass


REFUSED = message_of(error={"code": -32602, "message": "Unknown tool: t"})


@pytest.mark.parametrize(
    ("tools", "difference"),
    [([], "t is gone"), ([tool_of("t", {"type": "object", "required": ["b"]})], "t has another schema")],
)
async def test_a_changed_tool_is_not_the_models_fault(tools: list[Any], difference: str) -> None:
    plan = plan_of([tool_of("t", {"type": "object"}), tool_of("u", {"type": "object"})])
    async with opened(plan) as (toolset, notices), toolset.chain("a", {}) as session:
        plan["tools"] = [*tools, tool_of("new", {"type": "object"}), tool_of("u", {"type": "object"})]
        plan["answers"] = {"t": REFUSED, "u": REFUSED}
        with pytest.raises(ToolInfrastructureError, match=f"{difference} since the run began: Unknown tool: t"):
            await session.call(ToolCall("1", "t", {}))
        assert (await session.call(ToolCall("1", "u", {}))).error is CallError.INVALID_ARGUMENTS
    assert str(notices[0]) == (
        f"tool server raw changed its tools: {difference}, new is new; the run keeps the tools that it began with, "
        "which are part of its prompts; fix: start it again to use the new ones"
    )


async def test_a_list_that_changes_is_told() -> None:
    changed = '{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n'
    plan = plan_of([tool_of("t", {"type": "object"})])
    plan["answers"] = {"t": changed + message_of(result={"content": []})}
    async with opened(plan, deny=[]) as (toolset, notices), toolset.chain("a", {}) as session:
        await session.call(ToolCall("1", "t", {}))
        await asyncio.sleep(0.05)
        assert notices == []
        plan["tools"].append(tool_of("more", {"type": "object"}))
        await session.call(ToolCall("1", "t", {}))
        await until(lambda: notices)
        assert [spec.name for spec in toolset.specs] == ["t"]
    assert "changed its tools: more is new; the run keeps" in str(notices[0])


@pytest.mark.parametrize("method", ["server__discover", "initialize", "tools__list"])
async def test_a_server_that_never_answers_while_it_opens(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "OPEN_SECONDS", 0.2)
    with pytest.raises(ToolInfrastructureError, match=r"tool server raw: `raw` in /: not ready within 0.2 s"):
        async with opened(plan_of([], **{method: None})):
            pass


async def test_an_opening_ends_at_once_when_it_is_cancelled() -> None:
    async def wait() -> None:
        async with opened(plan_of([], tools__list=None)):
            pass

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 2
