"""Images in the messages of a chain, and the boxes in which its tools were asked to look."""

import base64
import binascii
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from transformers.utils.hub import cached_file

from agentfactory.rollout.images.families import STATED
from agentfactory.rollout.images.store import ImageStore, stored_digest
from agentfactory.tools.images.coordinates import Coordinates
from agentfactory.viewer.runs import Run
from agentfactory.viewer.saved_groups import calls_of

SHOWN_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""Kinds of images that are shown. Other kinds, and images elsewhere on the web, are named and never loaded."""
_BOXES = ("bbox_2d", "bbox", "box")
"""Arguments of tools that are a box: left, top, right and bottom."""
_NUMBERS = ("img_idx", "image_index")
"""Arguments of tools that are the number of an image in the chain, counted from 0."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of the image's width and height."""
Part = tuple[int, int]
"""(message, part of its content)"""


def image_url(part: Any) -> str | None:
    """Return the address in a part of a message if it is an image that may be shown, else None."""
    shown = part.get("image_url") if isinstance(part, dict) else None
    url = shown.get("url") if isinstance(shown, dict) else None
    if not isinstance(url, str):
        return None
    return url if _data(url) or stored_digest(url) else None


def read_image(run: Run, url: str) -> tuple[str, bytes]:
    """Return the kind and bytes of an image at an address from `image_url`. Raises ValueError if it is damaged or
    missing."""
    if digest := stored_digest(url):
        return "image/png", ImageStore(run.folder.images).png(digest)
    found = _data(url)
    if found is None:
        raise ValueError("no image that may be shown")
    kind, data = found
    try:
        return kind, base64.b64decode(data)
    except binascii.Error as error:
        raise ValueError("the image is not base64") from error


def data_url(run: Run, url: str) -> str:
    """Return the same image as a `data:` address; `url` itself if it cannot be read."""
    try:
        kind, content = read_image(run, url)
    except ValueError:
        return url
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def boxes_of(run: Run, messages: list[dict[str, Any]]) -> dict[Part, list[Box]]:
    """Return the boxes that tools were given, by the part with the image that they are in: the image whose number is
    another argument of the call, else the chain's first one."""
    coordinates = _coordinates(run)
    images: list[tuple[Part, str]] = []
    found: dict[Part, list[Box]] = {}
    for number, message in enumerate(messages):
        for box, image in _told(message) if coordinates is Coordinates.PIXELS else _asked(message):
            if image < len(images):
                place, url = images[image]
                share = box if coordinates is Coordinates.PIXELS else _share(run, url, box, coordinates)
                if share is not None:
                    found.setdefault(place, []).append(share)
        content = message.get("content")
        for part, shown in enumerate(content if isinstance(content, list) else ()):
            if (address := image_url(shown)) is not None:
                images.append(((number, part), address))
    return found


def _data(url: str) -> tuple[str, str] | None:
    """Return the kind and base64 data of a data URL with an image that may be shown, else None."""
    for kind in SHOWN_KINDS:
        if url.startswith(start := f"data:{kind};base64,"):
            return kind, url[len(start) :]
    return None


def _asked(message: dict[str, Any]) -> Iterator[tuple[Box, int]]:
    """Yield the boxes in a message's calls, as written, and the number of the image."""
    for _, arguments in calls_of(message):
        given = arguments if isinstance(arguments, dict) else {}
        numbers = [given[name] for name in _NUMBERS if type(given.get(name)) is int and given[name] >= 0]
        for name in _BOXES:
            box = given.get(name)
            if isinstance(box, list) and len(box) == 4 and all(type(side) in (int, float) for side in box):
                yield (box[0], box[1], box[2], box[3]), numbers[0] if numbers else 0


def _told(message: dict[str, Any]) -> Iterator[tuple[Box, int]]:
    """Yield the part that `image_tools` says it showed, as shares of an image of the task, and the number of that: its
    size in full is known nowhere else."""
    info = message.get("info")
    given = info if isinstance(info, dict) else {}
    box, size, number = given.get("box"), given.get("size"), given.get("of")
    try:
        left, top, right, bottom = (float(edge) / float(size[axis % 2]) for axis, edge in enumerate(box))  # type: ignore[arg-type, index]
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return  # info of another tool
    if type(number) is int and number >= 0 and _is_share((left, top, right, bottom)):
        yield (left, top, right, bottom), number


def _is_share(box: Box) -> bool:
    left, top, right, bottom = box
    return 0 <= left < right <= 1 and 0 <= top < bottom <= 1


def _share(run: Run, url: str, box: Box, coordinates: Coordinates) -> Box | None:
    """Return a box that a model stated as shares of the image, cut to it. None if nothing of the image is in it."""
    try:
        size = Image.open(BytesIO(read_image(run, url)[1])).size
    except (OSError, ValueError):
        return None
    # the image is stored in the size that the model got
    units = {Coordinates.RESIZED: size, Coordinates.RELATIVE1: (1, 1)}.get(coordinates, (1000, 1000))
    left, top, right, bottom = (min(max(edge / units[place % 2], 0.0), 1.0) for place, edge in enumerate(box))
    return (left, top, right, bottom) if left < right and top < bottom else None


def _coordinates(run: Run) -> Coordinates:
    """Return how the run's model states places; from 0 to 1000 if that is not known."""
    asked = run.coordinates()
    if asked in tuple(Coordinates):
        return Coordinates(asked)
    return STATED.get(_model_type(run.model_path()), Coordinates.RELATIVE1000)


def _model_type(model: str | None) -> str:
    try:
        file = cached_file(
            model or "", "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        return str(json.loads(Path(file).read_text(encoding="utf-8")).get("model_type")) if file else ""
    except (OSError, ValueError):
        return ""
