"""Conversion of a tool's return value to an MCP result, and of any server's MCP result to content for the model."""

import base64
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from typing import Any

from mcp.server.mcpserver import Audio, Image
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic_core import from_json, to_json, to_jsonable_python

from agentfactory.base.messages import CallError, Content, text_of
from agentfactory.tools.calls.message_bounds import BINARY_BYTES, passing
from agentfactory.tools.calls.truncation import cut_bytes, left_out_of, size_of, truncated
from agentfactory.tools.tool import Finish

ERROR_KEY = "agentfactory/error"
"""Key in a failed result's `_meta`: the CallError."""
FINISH_KEY = "agentfactory/finish"
"""Key in a result's `_meta`: true if the tool ends the chain."""
INFO_KEY = "agentfactory/info"
"""Key in a result's `_meta`: an object with information from the tool that the model does not see."""

SEEN_BY_MODELS = ("image/png", "image/jpeg", "image/webp", "image/gif")
_BLOCKS = (TextContent, ImageContent, AudioContent, ResourceLink, EmbeddedResource)


def result_of(value: Any, result_bytes: int | None = None) -> CallToolResult:
    """Convert a tool's return value to an MCP result: text, None (empty), JSON, images of Pillow or the SDK, or a list
    with images. Of a dict with `observation`, the rest becomes info; `finish(...)` ends the chain. Each text is cut to
    `result_bytes`. Raises TypeError or ValueError if it cannot be sent."""
    meta: dict[str, Any] = {}
    if isinstance(value, Finish):
        meta[FINISH_KEY] = True
        value = value.value
    if isinstance(value, dict) and "observation" in value:
        info = {key: item for key, item in value.items() if key != "observation"}
        if info:
            meta[INFO_KEY] = from_json(to_json(info, inf_nan_mode="strings", fallback=_plain))
        value = value["observation"]
    return CallToolResult(content=_blocks(value, result_bytes), _meta=meta or None)


def bounded(result: CallToolResult, result_bytes: int) -> CallToolResult:
    """Return the result with its text cut to `result_bytes`; above BINARY_BYTES of images, files and info, an error."""
    meta = result.meta or {}
    binary = sum(len(data) for block in result.content if isinstance(data := _binary(block), str))
    if INFO_KEY in meta:
        binary += len(to_json(meta[INFO_KEY]))
    if binary > BINARY_BYTES:
        mib = f"{binary / 2**20:.1f} MiB of images, files and info; {BINARY_BYTES >> 20} MiB are possible"
        return failure(CallError.TOOL_ERROR, f"The result is too large: it has {mib}.")

    def cut(text: str, most: int) -> str | None:
        # text that was cut on arrival has a marker with its full length
        before = left_out_of(text, passing(most)) or left_out_of(text, most)
        return cut_bytes(text, most, None if before is None else size_of(text) + before.missing)

    shorter = truncated(content_of(result), result_bytes, cut)
    if shorter is None:
        return result
    images = (block for block in result.content if _part(block)["type"] != "text")
    parts = [{"type": "text", "text": shorter}] if isinstance(shorter, str) else shorter
    blocks = [_text_block(part["text"]) if part["type"] == "text" else next(images) for part in parts]
    return CallToolResult(content=blocks, is_error=result.is_error, _meta=result.meta)


def failure(kind: CallError, text: str) -> CallToolResult:
    return CallToolResult(content=[_text_block(text)], is_error=True, _meta={ERROR_KEY: kind.value})


def content_of(result: CallToolResult) -> Content:
    """Return a result's content for the model, with markers for what it cannot read, or structured content as JSON."""
    parts = [_part(block) for block in result.content]
    structured = result.structured_content
    is_blank = all(part["type"] == "text" and not part["text"].strip() for part in parts)
    if structured is not None and is_blank and (not parts or next(_values(structured), None) is not None):
        return json.dumps(structured, ensure_ascii=False)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def unread_of(result: CallToolResult) -> list[str]:
    """Return the paths of values that only a result's structured content has, among the first _COMPARED."""
    if result.structured_content is None:
        return []
    text = text_of(content_of(result))
    values = islice(_values(result.structured_content), _COMPARED)
    written = ((path, _forms(value)) for path, value in values)
    return [path for path, forms in written if forms and not any(form in text for form in forms)]


_COMPARED = 100


def _values(value: Any, path: str = "") -> Iterator[tuple[str, str | int | float]]:
    """Yield the path and value of each number and each text in JSON, without blank texts."""
    match value:
        case dict() | list():
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _values(one, f"{path}.{key}" if path else str(key))
        case bool():
            return
        case int() | float():
            yield path, value
        case str() if value.strip():
            yield path, value


def _forms(value: str | float) -> list[str]:
    """Return the ways in which servers write a value in text; none that are too long for Python to write."""
    if isinstance(value, str):
        return [value.strip(), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    forms: list[str] = []
    for write in (json.dumps, "{:g}".format):
        with suppress(OverflowError, ValueError):  # of a whole number beyond floats, or of thousands of digits
            forms.append(write(value))
    return forms


def _blocks(value: Any, most: int | None) -> list[ContentBlock]:
    if isinstance(value, str):
        return [_text_block(value, most)]
    if value is None:
        return []
    if (block := _rich_block(value)) is not None:
        return [block]
    if isinstance(value, (list, tuple)):
        rich = [_rich_block(item) for item in value]
        if any(rich):
            pairs = zip(rich, value, strict=True)
            return [part for block, item in pairs for part in ([block] if block else _blocks(item, most))]
    return [_text_block(json.dumps(to_jsonable_python(value, fallback=_plain), ensure_ascii=False), most)]


def _text_block(text: str, most: int | None = None) -> TextContent:
    if most is not None:
        text = cut_bytes(text, most) or text
    # lone surrogates cannot be sent over a pipe or a socket; replacing them here gives every transport the same text
    return TextContent(type="text", text=text.encode("utf-8", "replace").decode("utf-8"))


def _rich_block(value: Any) -> ContentBlock | None:
    if isinstance(value, _BLOCKS):
        return value
    if isinstance(value, Image):
        return value.to_image_content()
    if isinstance(value, Audio):
        return value.to_audio_content()
    # if Pillow is not imported, there is no Pillow image
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(value, pillow.Image):
        return None
    if value.mode not in ("1", "L", "LA", "RGB", "RGBA"):
        value = value.convert("RGBA" if value.has_transparency_data else "RGB")
    file = BytesIO()
    value.save(file, "PNG")
    return ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("a tool returns a coroutine: write `async def`, and `await` before what it returns")
    raise TypeError(f"a tool returns text, JSON, an image, or a list with images, and not {type(value).__name__}")


def _binary(block: ContentBlock) -> str | None:
    match block:
        case ImageContent(data=data) | AudioContent(data=data):
            return data
        case EmbeddedResource(resource=BlobResourceContents(blob=data)):
            return data
    return None


def _part(block: ContentBlock) -> dict[str, Any]:
    match block:
        case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
            return {"type": "text", "text": text}
        case (
            ImageContent(mime_type=kind, data=data)
            | EmbeddedResource(resource=BlobResourceContents(mime_type=kind, blob=data))
        ) if kind in SEEN_BY_MODELS:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case ImageContent(mime_type=kind):
            marker = f"{kind} image"
        case AudioContent(mime_type=kind):
            marker = f"{kind} audio"
        case ResourceLink(uri=uri, name=name, description=about):
            named = uri if name in ("", uri) else f"{name} ({uri})"
            marker = f"resource {named}" + (f": {about}" if about else "")
        case EmbeddedResource(resource=resource):
            marker = f"{resource.mime_type or 'binary'} resource {resource.uri}"
    return {"type": "text", "text": f"[{marker}]"}
