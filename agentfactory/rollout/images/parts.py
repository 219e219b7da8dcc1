"""Images in messages and in rows of data: their placeholders and parts, in the formats of other projects too."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.messages import Message
from agentfactory.tools.images.decode import is_path

MARK = "<image>"
"""Placeholder of an image in the text of a row with `images` (ms-swift, verl)."""
_SOURCES = ("image", "url", "path", "base64", "bytes")
"""Keys of a part `{"type": "image"}` that may contain the image itself."""
_OTHER_COLUMNS = ("image", "video", "videos", "audio", "audios")
_MEDIA = (
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".mp4", ".webm", ".mov", ".mkv", ".wav", ".mp3", ".flac", ".ogg"),
)


def _is_media(value: Any) -> bool:
    """Return whether a column's value is an image, a video or a sound: a file, its bytes, or an object of a library."""
    if isinstance(value, list):
        return any(map(_is_media, value))
    if isinstance(value, str):
        return value.lower().endswith(_MEDIA) or value.startswith(("data:image/", "data:video/", "data:audio/"))
    if isinstance(value, dict):
        return bool(value.keys() & {"bytes", "array"}) or _is_media(value.get("path"))
    return isinstance(value, bytes) or not isinstance(value, int | float | None)


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def parts_of(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [text_part(content)] if content else []


def map_parts(messages: Sequence[Message], change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Message]:
    """Return messages with each part of their contents changed; what is no message stays as it is."""
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the form for chat templates, with placeholder parts instead of images."""
    return map_parts(messages, lambda part: {"type": "image"} if part["type"] == "image_url" else part)


def image_urls(messages: Sequence[Message]) -> list[Any]:
    """Return the addresses of the images in messages, in order, or the values given in place of addresses."""
    parts = (part for message in messages for part in parts_of(message))
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def images_of_row(task: dict[str, Any]) -> list[Any]:
    """Return the images of a row that `clean_row` returned: those in `images`, then those in its messages."""
    messages = task.get("messages")
    return [*(task.get("images") or ()), *image_urls(_dicts(messages if isinstance(messages, list) else ()))]


def clean_row(row: dict[str, Any], base: Path) -> dict[str, Any]:
    """Normalize the images of a row: `images` becomes a list, and content parts have the types `text`, `image_url` and
    `image` (one of `images`). Paths are relative to `base`. Raise ValueError for other media or numbers."""
    row = dict(row)
    for name in _OTHER_COLUMNS:
        if _is_media(row.get(name)):
            fix = f"data.columns: {{images: {name}}}" if name == "image" else "models here see images only: remove it"
            other = f"if only tools or rewards read it, give it another name: data.columns: {{NAME: {name}}}"
            raise ValueError(f"its column {name!r} is not read; {fix}; {other}")
    if isinstance(row.get("messages"), list):
        row["messages"] = map_parts(row["messages"], partial(_clean_part, base=base))
        if any(message.get("role") == "assistant" and image_urls([message]) for message in _dicts(row["messages"])):
            raise ValueError("an assistant message has an image, but models here write only text")
    if "images" not in row:
        if _places(row) > _marks(row):
            raise ValueError("its content has parts of type image, but there is no column `images`")
        return row
    given = row["images"]
    row["images"] = [_rooted(image, base) for image in (given if isinstance(given, list) else [given]) if image]
    count, places = len(row["images"]), _places(row)
    if places not in (0, count) or (places and not count):
        raise ValueError(f"it has {count} images, but its text has placeholders ({MARK}) for {places}")
    return row


def place_images(task: dict[str, Any], addresses: Callable[[Any], str]) -> list[Message]:
    """Return the opening messages of a cleaned row with image parts, whose addresses `addresses` returns, at their
    placeholders. Without placeholders in the text, images come first in the first user message."""
    messages = task.get("messages") or [{"role": "user", "content": str(task["question"])}]
    images = iter(task.get("images") or [])
    if _places({**task, "messages": messages}):
        return [_placed(message, images, addresses) for message in messages]
    placed = [_placed(message, iter(()), addresses) for message in messages]
    if task.get("images"):
        at = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            raise ValueError("it has images, but no user message for them")
        shown = [image_part(addresses(image)) for image in images]
        placed[at] = {**placed[at], "content": [*shown, *parts_of(placed[at])]}
    return placed


def show_in_user_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the images of tool messages moved to a user message right after them."""
    shown: list[Message] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" and waiting:
            shown.append({"role": "user", "content": waiting})
            waiting = []
        if message["role"] == "tool" and (images := [p for p in parts_of(message) if p["type"] == "image_url"]):
            waiting += images
            told = [p["text"] if p["type"] == "text" else "[image: see below]" for p in parts_of(message)]
            message = {**message, "content": "\n".join(told)}
        shown.append(message)
    return [*shown, {"role": "user", "content": waiting}] if waiting else shown


def _clean_part(part: Any, base: Path) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ValueError(f"a part of its content is {part!r:.100}, not an object with a type")
    part = {key: value for key, value in part.items() if value is not None}
    match part.get("type"):
        case "text":
            if not isinstance(part.get("text"), str):
                raise ValueError(f"a part of its content has no text: {part!r:.100}")
            return part
        case "image_url":
            address = part.get("image_url")
            return image_part(_rooted(address.get("url") if isinstance(address, dict) else address, base))
        case "image":
            source = next((part[key] for key in _SOURCES if key in part), None)
            return {"type": "image"} if source is None else image_part(_rooted(source, base))
    raise ValueError(f"a part of its content has the type {part.get('type')!r}; use text, image or image_url")


def _rooted(image: Any, base: Path) -> Any:
    if isinstance(image, dict) and not image.get("bytes") and image.get("path"):
        image = image["path"]
    return str(base / str(image).removeprefix("file://")) if is_path(image) else image


def texts_of(row: dict[str, Any], with_turns: bool = False) -> Iterator[str]:
    """Yield the texts of a row's question or messages; those of assistant messages only if `with_turns`."""
    messages = row.get("messages")
    if messages is None:
        yield str(row.get("question", ""))
        return
    for message in _dicts(messages):
        if with_turns or message.get("role") != "assistant":
            yield from (part["text"] for part in parts_of(message) if part["type"] == "text")


def _dicts(messages: Sequence[Any]) -> list[Message]:
    """Return the messages that are objects; others raise an error when they are rendered."""
    return [message for message in messages if isinstance(message, dict)]


def _marks(row: dict[str, Any]) -> int:
    return sum(text.count(MARK) for text in texts_of(row))


def _places(row: dict[str, Any]) -> int:
    parts = [part for message in _dicts(row.get("messages") or ()) for part in parts_of(message)]
    return _marks(row) + sum(part["type"] == "image" for part in parts)


def _placed(message: Message, images: Iterator[Any], addresses: Callable[[Any], str]) -> Message:
    """Return a message with `images` at its placeholders; once there are no more images, text stays unchanged."""
    content = message.get("content")
    parts: list[dict[str, Any]] = []
    for part in parts_of(message):
        if part["type"] == "image_url":
            parts.append(image_part(addresses(part["image_url"]["url"])))
        elif part["type"] == "image":
            parts.append(image_part(addresses(next(images))))
        elif message["role"] == "assistant":
            parts.append(part)
        else:
            first, *rest = part["text"].split(MARK)
            parts.append(text_part(first))
            for text in rest:
                image = next(images, None)
                parts += [text_part(MARK + text)] if image is None else [image_part(addresses(image)), text_part(text)]
    parts = [part for part in parts if part != text_part("")]
    if all(part["type"] == "text" for part in parts) and not isinstance(content, list):
        return message
    return {**message, "content": parts}
