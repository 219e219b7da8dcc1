"""Parts of messages, from the forms of the protocols into ours."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentfactory.rollout.gateway.request_options import wrong
from agentfactory.rollout.images.parts import image_part, text_part
from agentfactory.tools.messages import Content, Message

Part = dict[str, Any]


def read_content(content: Any, read_part: Callable[[Part], Part | None]) -> Content:
    """Return a content in our form: text if it has no images. `read_part` converts a part; None leaves it out. Raises
    Refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(f"content: got {str(content)[:200]}; use a text, or a list of parts")
    parts = [part for given in content if (part := read_part(_dict(given))) is not None]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def read_text(part: Mapping[str, Any]) -> Part:
    """Return a part of text. Raises Refusal."""
    if not isinstance(text := part.get("text"), str):
        raise wrong(f"content: {str(part)[:200]} has no text")
    return text_part(text)


def read_image(url: Any) -> Part:
    """Return a part for an image at an address. Raises Refusal: an address is never fetched."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise wrong(f"image: {str(url)[:200]} is not fetched; send the image itself, as a data: address")
    return image_part(url)


def unknown(part: Mapping[str, Any]) -> Exception:
    """Return the refusal of a part of a type that no model here reads."""
    return wrong(f"content: parts of type {part.get('type')!r} cannot be read; send text or images")


def assistant(text: str, calls: list[tuple[str, str, Any]], reasoning: str = "") -> Message:
    """Return an assistant's message with calls: id, name, and arguments, as a value or as JSON text."""
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
    """Return arguments as chat templates take them; text that is no JSON object stays text."""
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
