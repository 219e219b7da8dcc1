"""Raw servers in this process: their lines pass through the same code as those of a program on stdio, or over HTTP."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from agentfactory.base.config import LimitsConfig, ToolsRecipe
from agentfactory.base.run_notices import Notice, notice_of
from agentfactory.tools.calls.message_bounds import MessageFilter
from agentfactory.tools.mcp_servers import server_connection
from agentfactory.tools.mcp_servers.server_messages import Repairs, Tell
from agentfactory.tools.mcp_servers.stdio import messages_of
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from tests.tools.roughness.raw_server import replies


@asynccontextmanager
async def opened(
    plan: dict[str, Any], result_bytes: int = 1 << 20, **fields: Any
) -> AsyncIterator[tuple[Toolset, list[Notice]]]:
    """Open a toolset of one server `raw` that follows `plan`; yield it and the notices to the user."""
    servers = {"raw": {"command": "raw", "isolation": "shared", **fields}}
    recipe = ToolsRecipe.model_validate({"mcp_servers": servers})
    with _in_process(plan), noticed() as notices, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitsConfig, "result_bytes", result_bytes)
        async with open_toolset(recipe, Path("/")) as toolset:
            yield toolset, notices


@contextmanager
def noticed() -> Iterator[list[Notice]]:
    notices: list[Notice] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (notice := notice_of(record)) is not None:
                notices.append(notice)

    handler, logger = Collect(), logging.getLogger("agentfactory")
    logger.addHandler(handler)
    try:
        yield notices
    finally:
        logger.removeHandler(handler)


def _in_process(plan: dict[str, Any]) -> Any:
    @asynccontextmanager
    async def transport(
        server: Any, errlog: Any, most: int, tell: Tell, **notes: Any
    ) -> AsyncIterator[TransportStreams]:
        incoming_end, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](64)
        outgoing, outgoing_end = anyio.create_memory_object_stream[SessionMessage](64)

        async def serve() -> None:
            messages, repairs = MessageFilter(most), Repairs(tell)
            async for sent in outgoing_end:
                message = sent.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
                repairs.sent(message)
                for reply in replies(plan, json.dumps(message)):
                    for line in messages.feed(reply.encode("utf-8", "surrogateescape") + b"\n"):
                        for message in messages_of(line, repairs) if line.strip() else []:
                            await incoming_end.send(message)

        async with anyio.create_task_group() as tasks, incoming_end, incoming, outgoing, outgoing_end:
            tasks.start_soon(serve)
            yield incoming, outgoing
            tasks.cancel_scope.cancel()

    return mock.patch.object(server_connection, "stdio_transport", transport)


def tool_of(name: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "description": name, "inputSchema": schema}


def plan_of(tools: list[Any], answers: dict[str, str] | None = None, **methods: str | None) -> dict[str, Any]:
    """Return a plan for raw_server.py; `methods` are answers to other methods (a `/` is written `__`)."""
    plan = {"tools": tools, "answers": answers or {}}
    plan["methods"] = {name.replace("__", "/"): text for name, text in methods.items()}
    return json.loads(json.dumps(plan))


PLAN = plan_of([tool_of("t", {"type": "object"})])
Reply = Callable[[dict[str, Any]], tuple[str, list[str], str]]
"""Request -> the status line, the headers and the body."""


@asynccontextmanager
async def http_server(reply: Reply, session: bool = True) -> AsyncIterator[str]:
    """Serve `reply` for tools/call and for other HTTP methods than POST, and PLAN for the rest; yield the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(row[15:]) for row in head.lower().splitlines() if row.startswith("content-length")), 0)
            body = (await reader.readexactly(length)).decode() or json.dumps({"method": head.split()[0]})
            message = json.loads(body)
            if message["method"] in ("tools/call", "DELETE"):
                status, headers, text = reply(message)
            elif message["method"] == "GET":
                status, headers, text = "405 No", [], ""
            else:
                status, headers, text = "202 Accepted", [], "".join(replies(PLAN, body))
                if text:
                    status, headers = "200 OK", ["Content-Type: application/json", *(["Mcp-Session-Id: 5"] * session)]
            data = text.encode("utf-8", "surrogateescape")
            lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(data)}", "Connection: close", "", ""]
            writer.write("\r\n".join(lines).encode() + data)
            await writer.drain()
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
