"""The streamable HTTP transport: bounded, repaired messages, and refusals without a JSON-RPC message."""

import inspect
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import httpx2
import mcp.client.streamable_http as of_sdk
from mcp import Client
from mcp.client.session import MessageHandlerFnT
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp_types import INTERNAL_ERROR

from agentfactory.base.http.proxies import Proxy
from agentfactory.base.http.server_keys import key_header, pinned
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.calls.message_bounds import MessageFilter, most_bytes
from agentfactory.tools.mcp_servers.server_entry import HttpAddress
from agentfactory.tools.mcp_servers.server_messages import Repairs, Tell

_END_SECONDS = 5.0
_OF_GATEWAYS = (401, 402, 403, 407, 408, 429, 502, 503, 504)
"""Statuses that refuse a request before any tool gets it, even if the body is a JSON-RPC error."""
_SHOWN = 200
if is_before_2_2 := "max_sse_event_size" not in inspect.signature(streamable_http_client).parameters:
    # the SDK leaves events httpx2's bound of 1 MiB; `MessageFilter` has a wider one
    vars(of_sdk)["EventSource"] = partial(vars(of_sdk)["EventSource"], max_event_size=None)


@asynccontextmanager
async def http_client(
    target: HttpAddress,
    proxy: Proxy | None,
    note: Callable[[httpx2.Response], None],
    result_bytes: int,
    tell: Tell,
    receive: MessageHandlerFnT,
) -> AsyncIterator[Client]:
    """Yield a client of `target`, with the older protocol if it needs a session. `note` gets each response."""
    url, repairs = pinned(target.url), Repairs(tell)

    async def send(request: httpx2.Request) -> None:
        # looked up for each request: a restarted server has another key
        for name, value in key_header(url).items():
            request.headers.setdefault(name, value)
        if request.method == "DELETE":  # the end of a session, which has no other time limit
            request.extensions["timeout"] = httpx2.Timeout(_END_SECONDS).as_dict()
        repairs.sent(_message_in(request))

    async def receive_response(response: httpx2.Response) -> None:
        note(response)
        asked = _message_in(response.request).get("id")
        kind = response.headers.get("content-type", "").lower()
        is_stream = kind.startswith("text/event-stream")
        has_messages = is_stream or kind.startswith("application/json")
        if has_messages:
            if coding := response.headers.get("content-encoding"):
                raise ToolInfrastructureError(f"{target.url} answers in {coding}, although identity was requested")
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Messages(response.stream, MessageFilter(result_bytes, is_stream), repairs, asked)
        if asked is not None and (text := await _refusal(response, has_messages)):
            repairs.forget(asked)
            error = {"code": INTERNAL_ERROR, "message": text}
            await response.aclose()
            response.status_code = max(response.status_code, 400)  # for the SDK to read the body
            response.headers["content-type"] = "application/json"
            response._content = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()

    async with httpx2.AsyncClient(
        headers={"accept-encoding": "identity", **target.headers},
        timeout=httpx2.Timeout(None, connect=30.0),  # calls have their own time limit
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        event_hooks={"request": [send], "response": [receive_response]},
        verify=_ssl_context(),
        proxy=None if proxy is None else proxy.url,
        trust_env=False,
    ) as http:
        bound: dict[str, Any] = {} if is_before_2_2 else {"max_sse_event_size": most_bytes(result_bytes)}
        transport = streamable_http_client(url, http_client=http, **bound)
        mode = "legacy" if target.session else "auto"
        async with Client(transport, cache=None, mode=mode, message_handler=receive) as client:
            yield client


class _Messages(httpx2.AsyncByteStream):
    """A response body whose messages are bounded while they arrive, and repaired."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, messages: MessageFilter, repairs: Repairs, asked: int | str | None
    ) -> None:
        self._stream, self._messages, self._repairs, self._asked = stream, messages, repairs, asked

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            for message in self._messages.feed(chunk):
                yield self._repairs.repaired_body(message, self._asked)
        yield self._repairs.repaired_body(self._messages.end(), self._asked)

    async def aclose(self) -> None:
        await self._stream.aclose()


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the context shared by all connections: creating one takes 20 ms, most of the cost of a session."""
    return httpx2.create_ssl_context()


def _message_in(request: httpx2.Request) -> dict[str, Any]:
    return json.loads(request.content) if request.method == "POST" else {}


async def _refusal(response: httpx2.Response, has_messages: bool) -> str:
    """Return the status and the remedies, which the SDK leaves out, for a response without a message; else ""."""
    status, request = response.status_code, response.request
    if 300 <= status < 400 or (status < 300 and status != HTTPStatus.ACCEPTED and has_messages):
        return ""
    body = await _beginning(response, whole=has_messages)
    error = _error_of(body) if status >= 400 else None
    if error is not None and status not in _OF_GATEWAYS:
        return ""
    said = str(error.get("message", "")) if error else " ".join(body.decode("utf-8", "replace").split())
    text = f"HTTP {status} {response.reason_phrase}".strip()
    if status == HTTPStatus.ACCEPTED:
        text += ", which announces no answer"
    elif status < 300:
        kind = response.headers.get("content-type", "").lower()
        text += f" with the content type {kind or 'none'} instead of JSON"
    if (wait := response.headers.get("retry-after")) is not None:
        text += f", Retry-After: {wait}"
    if status in (401, 403, 407):
        given = "authorization" in request.headers
        text += f", {'the key in `headers` is refused' if given else 'it needs a key: set `headers` of its entry'}"
        if (scheme := response.headers.get("www-authenticate")) is not None:
            text += f" (WWW-Authenticate: {scheme[:_SHOWN]})"
    if status in (404, 405) and MCP_SESSION_ID not in request.headers:
        text += ", no MCP server at this path: an address of streamable HTTP often ends with /mcp"
        text += ", and the older transport SSE is not supported" if request.url.path.endswith("/sse") else ""
    return text + (f": {said[:_SHOWN]}" if said else "")


async def _beginning(response: httpx2.Response, whole: bool) -> bytes:
    if whole:
        return await response.aread()
    read = b""
    async for chunk in response.aiter_bytes():
        read += chunk
        if len(read) >= 4096:
            break
    return read


def _error_of(body: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = message.get("error") if isinstance(message, dict) and "jsonrpc" in message else None
    return error if isinstance(error, dict) else None
