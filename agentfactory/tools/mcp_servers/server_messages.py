"""Repair of a server's messages, before the MCP SDK validates them.

For one part that does not fit its types, the SDK refuses a whole answer, or the whole list of tools. Here such a part
becomes one that fits: in answers a text that the model reads, in lists of tools a description without the part.
Each repair is reported, because other clients may refuse the server.
"""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from mcp import MCPError
from mcp.client._transport import ReadStream, TransportStreams
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    Tool,
    jsonrpc_message_adapter,
)

from agentfactory.base.errors import short
from agentfactory.tools.calls.mcp_results import SEEN_BY_MODELS

Tell = Callable[[str], None]
"""Reports a repair to the user."""

HTTP_REFUSED = "agentfactory/http-refused"
"""Key in the data of the JSON-RPC error that replaces an HTTP response without a JSON-RPC message."""
_SERVERS_OWN = "agentfactory/error-data"
"""Key in the data of an error that the server sent, and not the SDK: the server's own data."""
_BARE = "agentfactory/bare"
"""Key in a result that is not an object: the result."""
_SCHEMA = "agentfactory/schema"
"""Key in a tool's `_meta`: the schema as it came, if the SDK would refuse it."""
REPAIR = "agentfactory/repair"
"""Key in a tool's `_meta`: what was wrong with it."""
_FAULT = "agentfactory/fault"
"""Key in the `_meta` of a list of tools that cannot be used: the reason."""


@asynccontextmanager
async def mended(
    transport: AbstractAsyncContextManager[TransportStreams], tell: Tell
) -> AsyncIterator[TransportStreams]:
    """Yield the streams of `transport`, with repaired messages."""
    async with transport as (incoming, outgoing):
        methods: dict[int | str, str] = {}  # of the requests that are not answered yet, by id
        yield _Incoming(incoming, methods, tell), _Outgoing(outgoing, methods)


def servers_own(error: MCPError) -> bool:
    """Return whether the server sent this error, in contrast to one of its transport."""
    return isinstance(error.error.data, dict) and _SERVERS_OWN in error.error.data


def error_data(error: MCPError) -> Any:
    """Return the data that a server sent with its error."""
    data = error.error.data
    return data.get(_SERVERS_OWN) if isinstance(data, dict) and _SERVERS_OWN in data else data


def error_text(error: MCPError) -> str:
    """Return the text of a server's error for the model: the message, and the data that it has."""
    data = error_data(error)
    message = error.error.message.strip() or f"error {error.error.code}"
    if data is None or data == "" or data == {} or data == []:
        return message
    details = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return message if details in message else f"{message}\n{details}"


def as_it_came(tool: Tool) -> Tool:
    """Return a listed tool with the schema that the server sent."""
    if _SCHEMA not in (tool.meta or {}):
        return tool
    meta = dict(tool.meta or {})
    return tool.model_copy(update={"input_schema": meta.pop(_SCHEMA), "meta": meta or None})


def fault_of_page(meta: Any) -> str | None:
    """Return why a page of the list of tools cannot be used; None if it can."""
    return (meta or {}).get(_FAULT)


def parsed(message: bytes) -> list[JSONRPCMessage]:
    """Parse a line of JSON: a message, or a batch of several. Raises ValueError if it is neither."""
    try:
        return [jsonrpc_message_adapter.validate_json(message, by_name=False)]
    except ValueError:
        if (mended := _read(message)) is None:
            raise
        return [jsonrpc_message_adapter.validate_json(one, by_name=False) for one in mended]


def repaired(message: bytes) -> bytes:
    """Return a message in an HTTP body as JSON that the SDK accepts; unchanged if it cannot be read. A prefix such as
    `data: ` stays."""
    start = message.find(b"{")
    before = message.find(b"[", 0, start if start >= 0 else None)
    start = before if before >= 0 else start
    body = message[start:].rstrip()
    if start < 0:
        return message
    try:
        jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValueError:
        mended = _read(body)
        if mended is not None and len(mended) == 1:
            return message[:start] + mended[0] + message[start + len(body) :]
    return message


def _read(message: bytes) -> list[bytes] | None:
    """Return messages that JSON allows and the SDK does not as JSON for the SDK; None if they are no JSON-RPC. Half a
    surrogate pair, and bytes that are no UTF-8, become U+FFFD."""
    try:
        value = json.loads(message.decode("utf-8", "replace"), strict=False)
        batch = value if isinstance(value, list) else [value]
        if not batch or not all(isinstance(one, dict) and {"id", "method"} & one.keys() for one in batch):
            return None
        texts = [json.dumps(_envelope(one), ensure_ascii=False) for one in batch]
        return [_SURROGATE.sub("\ufffd", text).encode() for text in texts]
    except (ValueError, RecursionError):
        return None


_SURROGATE = re.compile("[\ud800-\udfff]")


def _envelope(message: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-RPC message with fields of the right types."""
    message = {**message, "jsonrpc": "2.0"}
    number = message.get("id")
    if isinstance(number, float) and number.is_integer():
        message["id"] = int(number)
    if "method" in message:
        if not isinstance(message.get("params", {}), dict):
            del message["params"]
        return message
    error = message.pop("error", None)
    if error is None:
        result = message.get("result")
        return message | {"result": result if isinstance(result, dict) else {_BARE: result}}
    error = error if isinstance(error, dict) else {"message": error}
    code, text = error.get("code"), error.get("message")
    message.pop("result", None)
    return message | {
        "error": {
            "code": code if isinstance(code, int) and not isinstance(code, bool) else 0,
            "message": text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False),
            "data": error.get("data"),
        }
    }


class _Stream:
    """A wrapper of a transport's stream, closed with it."""

    def __init__(self, stream: Any, methods: dict[int | str, str]) -> None:
        self._stream = stream
        self._methods = methods

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        closed: bool | None = await self._stream.__aexit__(kind, error, trace)
        return closed


class _Incoming(_Stream):
    """A transport's stream of received messages, with repairs."""

    def __init__(
        self, stream: ReadStream[SessionMessage | Exception], methods: dict[int | str, str], tell: Tell
    ) -> None:
        super().__init__(stream, methods)
        self._tell = tell

    @property
    def last_context(self) -> Any:
        """See `mcp.shared._stream_protocols.ReadStream`."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return self._mend(await self._stream.receive())

    def __aiter__(self) -> "_Incoming":
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._mend(await self._stream.__anext__())

    def _mend(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        message = None if isinstance(item, Exception) else item.message
        match message:
            case JSONRPCResponse():
                mend = _MENDS.get(self._methods.pop(coerce_request_id(message.id), ""))
                if mend is not None:
                    message.result = mend(message.result, self._tell)
            case JSONRPCError():
                if message.id is None and len(self._methods) == 1:
                    message.id = next(iter(self._methods))  # it can answer nothing else
                method = "" if message.id is None else self._methods.pop(coerce_request_id(message.id), "")
                if method == "tools/call" and not _of_transport(message):
                    message.error.data = {_SERVERS_OWN: message.error.data}
        return item


class _Outgoing(_Stream):
    """A transport's stream of sent messages, which notes the methods of requests."""

    async def send(self, item: SessionMessage, /) -> None:
        match item.message:
            case JSONRPCRequest(id=number, method=method) if method != "subscriptions/listen":  # open until the end
                self._methods[coerce_request_id(number)] = method
            case JSONRPCNotification(method="notifications/cancelled", params={"requestId": int() | str() as number}):
                self._methods.pop(coerce_request_id(number), None)
        await self._stream.send(item)


def _of_transport(message: JSONRPCError) -> bool:
    """Return whether our transport made this error, in place of an answer that never came."""
    error = message.error
    refused = isinstance(error.data, dict) and HTTP_REFUSED in error.data
    return refused or (error.code == CONNECTION_CLOSED and error.message.startswith("SSE stream "))


def _mend_initialize(result: dict[str, Any], tell: Tell) -> dict[str, Any]:
    given = result.get("capabilities")
    given = given if isinstance(given, dict) else {}
    capabilities = {
        name: value if isinstance(value, dict) else {} for name, value in given.items() if value is not None
    }
    info = result.get("serverInfo")
    info = info if isinstance(info, dict) else {}
    named = {key: info[key] if isinstance(info.get(key), str) else "" for key in ("name", "version")}
    mended = {"protocolVersion": result.get("protocolVersion"), "capabilities": capabilities, "serverInfo": named}
    if isinstance(instructions := result.get("instructions"), str):
        mended["instructions"] = instructions
    return mended


def _mend_tools(result: dict[str, Any], tell: Tell) -> dict[str, Any]:
    tools = result.get(_BARE, result.get("tools"))
    page = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}  # the newer protocol requires them
    if not isinstance(tools, list):
        fault = f"its answer to tools/list has no list `tools`, but {short(tools)}"
        return page | {"tools": [], "_meta": {_FAULT: fault}}
    cursor = result.get("nextCursor")
    cursor = cursor if cursor is None or isinstance(cursor, str) else json.dumps(cursor)
    return page | {"tools": [_mend_tool(tool) for tool in tools], "nextCursor": cursor}


def _mend_tool(tool: Any) -> dict[str, Any]:
    """Return a tool with the fields that are used here. Its output schema is not one of them: the SDK would refuse an
    answer that does not fit it. A tool that cannot be called gets an empty name."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return {"name": "", "inputSchema": {"type": "object"}, "_meta": {REPAIR: f"has no name: {short(tool)}"}}
    mended: dict[str, Any] = {"name": tool["name"]}
    if (description := tool.get("description")) is not None:
        mended["description"] = description if isinstance(description, str) else json.dumps(description)
    meta = tool.get("_meta")
    meta = dict(meta) if isinstance(meta, dict) else {}
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        meta[REPAIR] = f"has no schema, but {short(schema)}; models see one without properties"
        schema = {"type": "object", "properties": {}}
    mended["inputSchema"] = schema
    if not _fits_the_sdk(schema):
        mended["inputSchema"], meta[_SCHEMA] = {"type": "object"}, schema
    if isinstance(hints := tool.get("annotations"), dict):
        mended["annotations"] = {
            key: value for key, value in hints.items() if isinstance(value, bool) and key.endswith("Hint")
        }
    return mended | ({"_meta": meta} if meta else {})


def _fits_the_sdk(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        schema.get("type") == "object"
        and isinstance(schema.get("$schema", ""), str)
        and isinstance(properties, dict)
        and all(isinstance(value, (dict, bool)) for value in properties.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def _mend_call(result: dict[str, Any], tell: Tell) -> dict[str, Any]:
    if result.get("resultType") == "input_required":
        return result
    given = result.get(_BARE, result.get("content"))
    structured, is_error = result.get("structuredContent"), result.get("isError")
    repairs: list[str] = []
    if given is None:
        rest = {key: value for key, value in result.items() if key not in _FIELDS_OF_RESULTS}
        if rest or structured is None:
            repairs.append(f"an answer has no `content`{', so models read all of it' if rest else ''}")
        given = [json.dumps(rest, ensure_ascii=False)] if rest and structured is None else []
    elif not isinstance(given, list):
        repairs.append(f"the `content` of an answer is no list, but {short(given)}")
        given = [given if isinstance(given, (str, dict)) else json.dumps(given, ensure_ascii=False)]
    content = [block for item in given for block in _mend_block(item, repairs)]
    if structured is not None and not isinstance(structured, dict):
        if not content:
            content = [_text(json.dumps(structured, ensure_ascii=False))]
        structured = None
    failed = is_error is True or (isinstance(is_error, str) and is_error.lower() == "true") or is_error == 1
    if failed and not content and structured is None:
        content = [_text("The tool failed without a message.")]
    for repair in repairs[:1]:
        tell(repair)
    mended: dict[str, Any] = {"content": content, "isError": failed, "resultType": "complete"}
    if structured is not None:
        mended["structuredContent"] = structured
    if isinstance(meta := result.get("_meta"), dict):
        mended["_meta"] = meta
    return mended


_FIELDS_OF_RESULTS = ("_meta", "content", "isError", "resultType", "structuredContent", _BARE)


def _mend_block(item: Any, repairs: list[str]) -> list[dict[str, Any]]:
    """Return a block of an answer with the fields that are used here; several, if it has text beside a part that cannot
    be shown."""
    match item:
        case {"type": "text", "text": str(text)}:
            return [_text(text)]
        case {"type": "text", "text": int() | float() | list() | dict() as value}:
            repairs.append(f"an answer has a text that is {short(value)}")
            return [_text(json.dumps(value, ensure_ascii=False))]
        case {"type": "image", "data": str(data)}:
            return [_image(data, _word(item, "mimeType"))]
        case {"type": "audio", "data": str(data)}:
            return [{"type": "audio", "data": data, "mimeType": _word(item, "mimeType") or "unknown"}]
        case {"type": "resource_link", "uri": str(uri)}:
            more = {key: item[key] for key in ("description", "mimeType", "title") if isinstance(item.get(key), str)}
            return [{"type": "resource_link", "uri": uri, "name": _word(item, "name"), **more}]
        case {"type": "resource", "resource": {"text": str()} | {"blob": str()} as resource}:
            kept = {key: resource[key] for key in ("mimeType", "text") if isinstance(resource.get(key), str)}
            if "text" not in kept:
                kept["blob"] = resource["blob"]
            return [{"type": "resource", "resource": {"uri": _word(resource, "uri"), **kept}}]
    if isinstance(item, str):
        repairs.append("the `content` of an answer has a text outside a block")
        return [_text(item)]
    if not isinstance(item, dict):
        repairs.append(f"the `content` of an answer has {short(item)} instead of a block")
        return [_text(f"[{json.dumps(item, ensure_ascii=False)}]")]
    kind, mime = _word(item, "type") or "unknown content", _word(item, "mimeType")
    kind = "text missing" if kind == "text" else kind
    repairs.append(f"an answer has a block of the type {item.get('type')!r} that cannot be read: {short(item)}")
    blocks = []
    if item.get("type") not in (None, "text") or not isinstance(item.get("text"), str):
        rest = _readable({key: value for key, value in item.items() if key not in ("mimeType", "type")})
        details = f": {json.dumps(rest, ensure_ascii=False)}" if rest else ""
        blocks.append(_text(f"[{mime} {kind}{details}]" if mime else f"[{kind}{details}]"))
    if isinstance(words := item.get("text"), str):
        blocks.append(_text(words))
    return blocks


def _readable(value: Any) -> Any:
    """Return a value without what a model cannot read: nulls, annotations, and files in base64."""
    if isinstance(value, dict):
        return {key: _readable(one) for key, one in value.items() if key not in _UNREADABLE and one is not None}
    if isinstance(value, list):
        return [_readable(one) for one in value]
    return "..." if isinstance(value, str) and value.startswith("data:") else value


_UNREADABLE = ("_meta", "annotations", "blob", "data", "text")


def _image(data: str, kind: str) -> dict[str, Any]:
    """Return an image block. Its kind is recognised if the server names none that models can see."""
    prefix, comma, rest = data.partition(",")
    data = "".join((rest if comma and prefix.startswith("data:") else data).split())
    plain = kind.partition(";")[0].strip().lower()
    if plain not in SEEN_BY_MODELS:
        recognised = (known for start, known in _STARTS.items() if data.startswith(start))
        plain = next(recognised, plain or "unknown")
    return {"type": "image", "data": data, "mimeType": plain}


_STARTS = {"iVBORw0KGgo": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}
"""The beginning of an image in base64 -> its kind."""


def _word(item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) else ""


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_MENDS: dict[str, Callable[[dict[str, Any], Tell], dict[str, Any]]] = {
    "initialize": _mend_initialize,
    "tools/call": _mend_call,
    "tools/list": _mend_tools,
}
