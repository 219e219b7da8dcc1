"""Conversion of message parts from the protocols' formats to ours."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentfactory.base.messages import Content, Message
from agentfactory.rollout.gateway.request_options import wrong
from agentfactory.rollout.images.parts import image_part, text_part

Part = dict[str, Any]


def read_content(content: Any, read_part: Callable[[Part], Part | None]) -> Content:
    """Convert message content to our format: text if it has no images. `read_part` converts a part; None drops it.
    Raise Refusal if the content is invalid."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(f"content: got {str(content)[:200]}; use a text, or a list of parts")
    parts = [part for given in content if (part := read_part(_dict(given))) is not None]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def read_text(part: Mapping[str, Any]) -> Part:
    """Return a text part. Raise Refusal if it has no text."""
    if not isinstance(text := part.get("text"), str):
        raise wrong(f"content: {str(part)[:200]} has no text")
    return text_part(text)


def read_image(url: Any) -> Part:
    """Return an image part for a `data:` address. Raise Refusal for other addresses, which are never fetched."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise wrong(f"image: {str(url)[:200]} is not fetched; send the image itself, as a data: address")
    return image_part(url)


def unknown(part: Mapping[str, Any]) -> Exception:
    """Return the refusal of a part of an unsupported type."""
    return wrong(f"content: parts of type {part.get('type')!r} are not supported; send text or images")


def assistant(text: str, calls: list[tuple[str, str, Any]], reasoning: str = "") -> Message:
    """Return an assistant message. `calls` are (id, name, arguments), arguments as a value or as JSON text."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": _value(arguments)}}
            for key, name, arguments in calls
        ]
    return message


def _value(arguments: Any) -> Any:
    """Return arguments as chat templates expect them; text that is not a JSON object stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, strict=False) if arguments else {}
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _dict(part: Any) -> Part:
    if isinstance(part, str):
        return text_part(part)
    if not isinstance(part, dict):
        raise wrong(f"content: got the part {str(part)[:200]}; use an object with a type")
    return part
