"""Observations for the model: text as it is, images as images, and everything else as JSON."""

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from io import BytesIO
from typing import Any

from mcp_types import ImageContent

from agentfactory.base.messages import properties_of, required_of
from agentfactory.base.user_code.schema_text import inline

_BOUNDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems"),
)


def calls_tools(schema: dict[str, Any]) -> bool | None:
    """Return whether actions of a schema are calls of tools; None if only the server knows, as for no fields."""
    own = _own_fields(schema)
    kind = own.get("type")
    if isinstance(kind, dict) and kind.get("const") in ("call_tool", "list_tools"):
        return True
    return None if not own else False


def in_words(schema: dict[str, Any]) -> str:
    """Describe the actions of a schema. Raises KeyError, TypeError or RecursionError if it cannot be read."""
    schema = inline(schema)
    if _own_fields(schema):
        return "An action is an object with these fields:\n" + "\n".join(_lines(schema))
    kind = _kind({**schema, "properties": {}})
    return "An action is an empty object." if kind == "object" else f"An action is: {kind}"


def tools_in_words(tools: list[dict[str, Any]]) -> str:
    """Describe actions that call tools, each with `name`, `description` and `input_schema`. Raises like `in_words`."""
    told = ['An action calls a tool: {"tool_name": NAME, "arguments": {...}}. The tools:']
    for tool in tools:
        about = " ".join(str(tool.get("description") or "").split())
        schema = inline(tool.get("input_schema") or {})
        lines = _lines(schema) or ["- no arguments"]
        told.append("\n".join([f"{tool['name']}: {about}" if about else str(tool["name"]), *lines]))
    return "\n\n".join(told)


def _own_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields other than the `metadata` that every action may have."""
    optional = properties_of(schema).keys() - {*required_of(schema)}
    return {key: value for key, value in properties_of(schema).items() if key != "metadata" or key not in optional}


def _lines(schema: dict[str, Any]) -> list[str]:
    required, lines = required_of(schema), []
    for name, each in _own_fields(schema).items():
        kind = [_kind(each)]
        if name not in required:
            has_default = isinstance(each, dict) and "default" in each
            kind.append(f"default {json.dumps(each['default'], ensure_ascii=False)}" if has_default else "optional")
        about = " ".join(str(each.get("description") or "").split()) if isinstance(each, dict) else ""
        lines.append(f"- {name} ({', '.join(kind)})" + (f": {about}" if about else ""))
    return lines


def _kind(schema: Any) -> str:
    match schema:
        case {"const": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"enum": [*values]}:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        case {"anyOf": [*kinds]} | {"oneOf": [*kinds]} | {"type": [*kinds]}:
            return " | ".join(_kind(kind if isinstance(kind, dict) else {"type": kind}) for kind in kinds)
        case {"type": "array"}:
            kind = f"list of {_kind(schema.get('items'))}"
        case {"type": "object", "properties": dict(fields)} if fields:
            required = required_of(schema)
            inner = (f"{name}{'' if name in required else '?'}: {_kind(each)}" for name, each in fields.items())
            kind = f"object {{{', '.join(inner)}}}"
        case {"type": str(kind)}:
            pass
        case _:
            return "any"
    bounds = [f"{key} {json.dumps(schema[key], ensure_ascii=False)}" for key in _BOUNDS if key in schema]
    return " ".join([kind, *([f"[{', '.join(bounds)}]"] if bounds else [])])


_KINDS = {"iVBORw0KGgo": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}
"""Beginning of a file in base64 -> its type."""
_ADDRESS = re.compile(r"data:(image/[\w.+-]+);base64,(.*)", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_LEAST_PIXELS = 8
"""Minimum height and width of an array that is a picture."""
_OF_CALLS = ("tool_name", "error")
"""Fields of a tool's result that the model does not read: it knows the name, and gets the error as an error."""

Part = str | ImageContent


def shown(observation: dict[str, Any], names: Sequence[str] | None, of_call: bool = False) -> Part | list[Part]:
    """Return the fields of an observation that the model reads: `names`, or all except `metadata`. `of_call`: it is the
    answer to the call of a tool, whose `result` is always read."""
    left_out = ("metadata", *(_OF_CALLS if of_call else ()))
    fields = [name for name in observation if (name not in left_out if names is None else name in names)]
    if of_call:
        fields = [name for name in fields if name != "result"]
        fields = ["result", *fields] if observation.get("result") is not None else fields
    found = [(name, _parts(observation[name])) for name in fields]
    parts: list[Part] = []
    for name, those in found:
        first = those[0] if those else ""
        if len(found) == 1 or (of_call and name == "result"):
            parts += those
        elif isinstance(first, str):
            gap = "\n" if "\n" in first else " "
            parts += [f"{name}:{gap}{first}".rstrip(), *those[1:]]
        else:
            parts += [f"{name}:", *those]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(map(str, parts))
    return parts


def digest(observation: dict[str, Any]) -> str:
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def _parts(value: Any) -> list[Part]:
    match value:
        case str():
            return [_image(value) or value]
        case {"content": [*blocks]} if (read := _blocks(blocks)) is not None:  # the result of an MCP tool
            structured = value.get("structured_content")
            return read or ([] if structured is None else [_json(structured)])
        case [*items] if items and all(map(_is_message, items)):
            messages: list[Part] = []
            for item in items:
                first, *rest = _parts(item["content"]) or [""]
                lines = [f"{item['role']}: {first}"] if isinstance(first, str) else [f"{item['role']}:", first]
                messages += [*lines, *rest]
            return messages
        case [*items] if items and (read := _blocks(items)) is not None:
            return read
        case [[[*_], *_], *_] if (picture := _picture(value)) is not None:
            return [picture]
    return [_json(value)]


def _blocks(blocks: list[Any]) -> list[Part] | None:
    """Return the parts of content in the format of MCP, or of OpenAI; None if a block is neither text nor image."""
    parts: list[Part] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append(text)
            case {"type": "image", "data": str(data)}:
                kind = block.get("mimeType") or block.get("mime_type")
                parts.append(ImageContent(type="image", data=data, mime_type=str(kind or "image/png")))
            case {"type": "image_url", "image_url": {"url": str(url)}} if (image := _image(url)) is not None:
                parts.append(image)
            case _:
                return None
    return parts


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), (str, list))


def _image(text: str) -> ImageContent | None:
    """Return the image that a text is, as a `data:` address or a file in base64; None if it is none."""
    if (address := _ADDRESS.fullmatch(text)) is not None:
        return ImageContent(type="image", data=address[2], mime_type=address[1])
    kind = next((kind for beginning, kind in _KINDS.items() if text.startswith(beginning)), None)
    if kind is None or not _BASE64.fullmatch(text):
        return None
    return ImageContent(type="image", data="".join(text.split()), mime_type=kind)


def _picture(rows: list[Any]) -> ImageContent | None:
    """Return the picture whose pixels are rows of [red, green, blue], from 0 to 255; None if they are not."""
    import base64

    import numpy as np
    from PIL import Image

    try:
        pixels = np.asarray(rows)
    except ValueError:  # rows of different lengths
        return None
    if pixels.ndim != 3 or pixels.shape[2] != 3 or min(pixels.shape[:2]) < _LEAST_PIXELS or pixels.dtype.kind != "i":
        return None
    if pixels.min() < 0 or pixels.max() > 255:
        return None
    file = BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
