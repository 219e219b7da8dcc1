"""Repair of a server's messages, before the MCP SDK refuses a whole answer or list for one wrong part: in answers it
becomes a text that the model reads, in lists of tools it is left out. Each repair is reported."""

import json
import re
from collections.abc import Callable
from typing import Any

from mcp import Client, MCPError
from mcp.shared.dispatcher import coerce_request_id
from mcp_types import PARSE_ERROR, Tool

from agentfactory.base.errors import short
from agentfactory.base.messages import ToolInfrastructureError, object_of
from agentfactory.tools.calls.mcp_results import SEEN_BY_MODELS

MOST_PAGES = 1000
Tell = Callable[[str], None]

_SERVERS_OWN = "agentfactory/error-data"
"""Key in the data of an error that the server sent, and not the SDK: the server's own data."""
_SCHEMA = "agentfactory/schema"
"""Key in a tool's `_meta`: the schema as it came, if the SDK would refuse it."""
REPAIR = "agentfactory/repair"
"""Key in a tool's `_meta`: what was wrong with it."""
_FAULT = "agentfactory/fault"
"""Key in the `_meta` of a list of tools that cannot be used: the reason."""


class Repairs:
    """The repairs of one connection's messages, each of which `tell` reports."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._methods: dict[int | str, str] = {}  # of the requests that are not answered yet, by id

    def sent(self, message: dict[str, Any]) -> None:
        """Note a message to the server: the method of a request decides on the repair of its answer."""
        match message:
            case {"method": "notifications/cancelled", "params": {"requestId": int() | str() as number}}:
                self.forget(number)
            case {"method": str(method), "id": int() | str() as number} if method != "subscriptions/listen":
                self._methods[coerce_request_id(number)] = method  # the other one stays open until the end

    def forget(self, number: int | str) -> None:
        self._methods.pop(coerce_request_id(number), None)

    def repaired(self, text: bytes, asked: int | str | None = None) -> list[bytes]:
        """Return a text's messages, one or a batch, as JSON for the SDK, with U+FFFD for what is no UTF-8. `asked`: the
        id of the request that it answers, if known. Raises ValueError if it is no JSON-RPC."""
        try:
            value = json.loads(text.decode("utf-8", "replace"), strict=False)
            batch = value if isinstance(value, list) else [value]
            if not batch or not all(isinstance(one, dict) and {"id", "method"} & one.keys() for one in batch):
                raise ValueError("it is no JSON-RPC message")
            return [_encoded(self._mended(one, asked)) for one in batch]
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def repaired_body(self, part: bytes, asked: int | str | None) -> bytes:
        """Return a part of an HTTP body, with a prefix such as `data: `, with its message repaired, if any."""
        if (start := re.search(rb"[{\[]", part)) is None:
            return part
        body = part[start.start() :].rstrip()
        try:
            messages = self.repaired(body, asked)
        except ValueError:
            return part
        if len(messages) > 1:
            return part
        return part[: start.start()] + messages[0] + part[start.start() + len(body) :]

    def _mended(self, message: dict[str, Any], asked: int | str | None) -> dict[str, Any]:
        message = {**message, "jsonrpc": "2.0"}
        number = message.get("id")
        if isinstance(number, float) and number.is_integer():
            message["id"] = number = int(number)
        if "method" in message:
            if not isinstance(message.get("params", {}), dict):
                del message["params"]
            return message
        error = message.pop("error", None)
        if number is None and error is not None:
            if asked is None and len(self._methods) == 1:
                asked = next(iter(self._methods))  # it can answer nothing else
            message["id"] = number = asked
        method = self._methods.pop(coerce_request_id(number), "") if isinstance(number, (int, str)) else ""
        if error is None:
            result, mend = message.get("result"), _MENDS.get(method)
            return message | {"result": object_of(result) if mend is None else mend(result, self._tell)}
        message.pop("result", None)
        error = error if isinstance(error, dict) else {"message": error}
        code, text, data = error.get("code"), error.get("message"), error.get("data")
        mended = {
            "code": code if isinstance(code, int) and not isinstance(code, bool) else 0,
            "message": text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False),
            "data": {_SERVERS_OWN: data} if method == "tools/call" else data,
        }
        return message | {"error": mended}


def _encoded(message: dict[str, Any]) -> bytes:
    text = json.dumps(message, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def servers_own(error: MCPError) -> bool:
    """Return whether the server caused this error: it sent it, or its answer cannot be read."""
    data = error.error.data
    return error.code == PARSE_ERROR or (isinstance(data, dict) and _SERVERS_OWN in data)


def error_data(error: MCPError) -> Any:
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


async def list_tools(client: Client) -> list[Tool]:
    """List a server's tools, with the schemas that it sent. Raises ToolInfrastructureError."""
    tools: list[Tool] = []
    cursors: set[str] = set()
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        if fault := (page.meta or {}).get(_FAULT):
            raise ToolInfrastructureError(fault)
        for tool in page.tools:
            meta = dict(tool.meta or {})
            schema = meta.pop(_SCHEMA, tool.input_schema)
            tools.append(tool.model_copy(update={"input_schema": schema, "meta": meta or None}))
        cursor = page.next_cursor
        if not cursor:
            return tools
        if cursor in cursors:
            raise ToolInfrastructureError(f"its list of tools never ends: the cursor {short(cursor)} came twice")
        if len(cursors) == MOST_PAGES:
            raise ToolInfrastructureError(f"its list of tools has more than {MOST_PAGES} pages")
        cursors.add(cursor)


def _mend_initialize(result: Any, tell: Tell) -> dict[str, Any]:
    result = object_of(result)
    given, info = object_of(result.get("capabilities")), object_of(result.get("serverInfo"))
    capabilities = {name: object_of(value) for name, value in given.items() if value is not None}
    named = {key: info[key] if isinstance(info.get(key), str) else "" for key in ("name", "version")}
    mended = {"protocolVersion": result.get("protocolVersion"), "capabilities": capabilities, "serverInfo": named}
    if isinstance(instructions := result.get("instructions"), str):
        mended["instructions"] = instructions
    return mended


def _mend_tools(result: Any, tell: Tell) -> dict[str, Any]:
    tools = result.get("tools") if isinstance(result, dict) else result
    page = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}  # the newer protocol requires them
    if not isinstance(tools, list):
        fault = f"its answer to tools/list has no list `tools`, but {short(tools)}"
        return page | {"tools": [], "_meta": {_FAULT: fault}}
    cursor = object_of(result).get("nextCursor")
    cursor = cursor if cursor is None or isinstance(cursor, str) else json.dumps(cursor)
    return page | {"tools": [_mend_tool(tool) for tool in tools], "nextCursor": cursor}


def _mend_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return {"name": "", "inputSchema": {"type": "object"}, "_meta": {REPAIR: f"has no name: {short(tool)}"}}
    mended: dict[str, Any] = {"name": tool["name"]}
    if (description := tool.get("description")) is not None:
        mended["description"] = description if isinstance(description, str) else json.dumps(description)
    meta = dict(object_of(tool.get("_meta")))
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        meta[REPAIR] = f"has no schema, but {short(schema)}; models see one without properties"
        schema = {"type": "object", "properties": {}}
    mended["inputSchema"] = schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    fits_the_sdk = (
        schema.get("type") == "object"
        and isinstance(schema.get("$schema", ""), str)
        and isinstance(properties, dict)
        and all(isinstance(value, (dict, bool)) for value in properties.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )
    if not fits_the_sdk:
        mended["inputSchema"], meta[_SCHEMA] = {"type": "object"}, schema
    if isinstance(hints := tool.get("annotations"), dict):
        known = [key for key, value in hints.items() if isinstance(value, bool) and key.endswith("Hint")]
        mended["annotations"] = {key: hints[key] for key in known}
    return mended | ({"_meta": meta} if meta else {})


def _mend_call(result: Any, tell: Tell) -> dict[str, Any]:
    result = result if isinstance(result, dict) else {"content": result}
    if result.get("resultType") == "input_required":
        return result
    given, structured, is_error = (result.get(key) for key in ("content", "structuredContent", "isError"))
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


_FIELDS_OF_RESULTS = ("_meta", "content", "isError", "resultType", "structuredContent")


def _mend_block(item: Any, repairs: list[str]) -> list[dict[str, Any]]:
    """Return a block of an answer with the fields used here, and the text beside a part that is left out."""
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
    prefix, comma, rest = data.partition(",")
    data = "".join((rest if comma and prefix.startswith("data:") else data).split())
    plain = kind.partition(";")[0].strip().lower()
    if plain not in SEEN_BY_MODELS:
        recognised = (known for start, known in _STARTS.items() if data.startswith(start))
        plain = next(recognised, plain or "unknown")
    return {"type": "image", "data": data, "mimeType": plain}


_STARTS = {"iVBORw0KGgo": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}


def _word(item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) else ""


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_MENDS: dict[str, Callable[[Any, Tell], dict[str, Any]]] = {
    "initialize": _mend_initialize,
    "tools/call": _mend_call,
    "tools/list": _mend_tools,
}
