"""HTTP responses of MCP servers, or of gateways before them, that contain no JSON-RPC message."""

import json
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID
from mcp_types import INTERNAL_ERROR

from agentfactory.tools.mcp_servers.server_messages import HTTP_REFUSED

_OF_GATEWAYS = (401, 402, 403, 407, 408, 429, 502, 503, 504)
"""Statuses that refuse a request before any tool gets it, even if the body is a JSON-RPC error."""
_BODY_BYTES = 4096
_SHOWN = 200


async def name_refusal(response: httpx2.Response) -> None:
    """Replace a response that answers a request without a JSON-RPC message with a JSON-RPC error that names the status
    and the remedies. The SDK would leave them out."""
    request = response.request
    if request.method != "POST" or not _is_request(request.content):
        return
    status, kind = response.status_code, response.headers.get("content-type", "").lower()
    is_message = kind.startswith(("application/json", "text/event-stream"))
    if 300 <= status < 400 or (status < 300 and status != HTTPStatus.ACCEPTED and is_message):
        return
    body = await _beginning(response, whole=is_message)
    error = _error_of(body) if status >= 400 else None
    if error is not None and status not in _OF_GATEWAYS:
        return
    said = str(error.get("message", "")) if error else " ".join(body.decode("utf-8", "replace").split())
    text = f"HTTP {status} {response.reason_phrase}".strip()
    if status < 300 and status != HTTPStatus.ACCEPTED:
        text += f" with the content type {kind or 'none'} instead of JSON"
    elif status < 300:
        text += ", which announces no answer"
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
    text += f": {said[:_SHOWN]}" if said else ""
    error = {"code": INTERNAL_ERROR, "message": text, "data": {HTTP_REFUSED: status}}
    replacement = {"jsonrpc": "2.0", "id": None, "error": error}
    await response.aclose()
    response.status_code = max(status, 400)  # for the SDK to read the body
    response.headers["content-type"] = "application/json"
    response._content = json.dumps(replacement).encode()


def _is_request(content: bytes) -> bool:
    """Return whether a body that the SDK sends is a request, in contrast to a notification."""
    return "id" in json.loads(content)


async def _beginning(response: httpx2.Response, whole: bool) -> bytes:
    """Read the beginning of a body; with `whole` all of it, which must be bounded."""
    if whole:
        return await response.aread()
    read = b""
    async for chunk in response.aiter_bytes():
        read += chunk
        if len(read) >= _BODY_BYTES:
            break
    return read


def _error_of(body: bytes) -> dict[str, Any] | None:
    """Return the JSON-RPC error in a body; None if there is none."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = message.get("error") if isinstance(message, dict) and "jsonrpc" in message else None
    return error if isinstance(error, dict) else None
