"""Images in a chain's messages, and the boxes and points where its tools looked and acted, in any coordinates."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import takewhile
from typing import Any

from PIL import Image

from agentfactory.base.files.untrusted_files import read_json
from agentfactory.rollout.images.families import STATED
from agentfactory.rollout.images.store import ImageStore, stored_digest
from agentfactory.tools.images.coordinates import Coordinates
from agentfactory.viewer.runs.run_data import Run
from agentfactory.viewer.runs.saved_groups import calls_of

SHOWN_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""Kinds of images that are shown. Other kinds, and images on the web, are named and never loaded."""


def image_url(part: Any) -> str | None:
    """Return the address in a part of a message if it is an image that may be shown, else None."""
    shown = part.get("image_url") if isinstance(part, dict) else None
    url = shown.get("url") if isinstance(shown, dict) else None
    if not isinstance(url, str):
        return None
    return url if _data(url) or stored_digest(url) else None


def read_image(run: Run, url: str) -> tuple[str, bytes]:
    """Return the kind and bytes of an image of `image_url`. Raises ValueError if it is damaged or missing."""
    if digest := stored_digest(url):
        return "image/png", ImageStore(run.folder.images, run.folder.within).png(digest)
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


def _data(url: str) -> tuple[str, str] | None:
    """Return the kind and base64 data of a data URL with an image that may be shown, else None."""
    for kind in SHOWN_KINDS:
        if url.startswith(start := f"data:{kind};base64,"):
            return kind, url[len(start) :]
    return None


_BOXES = ("bbox_2d", "bbox", "box")
"""Tool arguments that contain a box: left, top, right and bottom."""
_NUMBERS = ("img_idx", "image_index")
"""Tool arguments that contain the number of an image in the chain, counted from 0."""
_PLACES = ("start_coordinate", "coordinate", "point", "point_2d")
"""Tool arguments that contain a point: x and y. The first of several is the start of a drag."""
_SIDES = (("start_x", "start_y"), ("startX", "startY"), ("x", "y"), ("endX", "endY"))

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of the image's width and height."""
Place = tuple[float, float]
Part = tuple[int, int]
"""(message, part of its content)"""
Call = tuple[int, int]
"""(message, call in it)"""


@dataclass
class Marks:
    """The marks to draw into a chain's images."""

    boxes: dict[Part, list[Box]] = field(default_factory=dict)
    """Boxes by the message part with their image."""
    places: dict[Call, list[Place]] = field(default_factory=dict)
    """Points by the call that acted there, in the last image before its message."""


def marks_of(run: Run, messages: list[dict[str, Any]], source: Any = None) -> Marks:
    """Return the boxes and the points of the tool calls of a chain, whose tasks are of `source`. A box is in the image
    whose number is another argument of the call, else in the chain's first one. A point is in the last image before the
    call. For both, the info of a tool's result takes precedence over the model's arguments."""
    coordinates = _coordinates(run, source)
    images: list[tuple[Part, str]] = []
    marks = Marks()
    for number, message in enumerate(messages):
        for box, image in _reported_box(message) if coordinates is Coordinates.PIXELS else _asked(message):
            if image < len(images):
                part, url = images[image]
                share = box if coordinates is Coordinates.PIXELS else _box_share(run, url, box, coordinates)
                if share is not None:
                    marks.boxes.setdefault(part, []).append(share)
        infos = _infos_after(messages, number) if message.get("tool_calls") else {}
        for place, call in enumerate(message.get("tool_calls") or ()):
            told = _reported_points(infos.get(call.get("id")))
            if images and (found := told or _places_asked(run, images[-1][1], call, coordinates)):
                marks.places[number, place] = found
        content = message.get("content")
        for index, shown in enumerate(content if isinstance(content, list) else ()):
            if (address := image_url(shown)) is not None:
                images.append(((number, index), address))
    return marks


def _infos_after(messages: list[dict[str, Any]], number: int) -> dict[Any, Any]:
    """Return the infos of the results of a message's calls, by the ids of the calls, which count within a turn."""
    results = takewhile(lambda message: message.get("role") != "assistant", messages[number + 1 :])
    return {result.get("tool_call_id"): result.get("info") for result in results if result.get("role") == "tool"}


def _asked(message: dict[str, Any]) -> Iterator[tuple[Box, int]]:
    """Yield the boxes in a message's calls, as written, and the number of the image."""
    for _, arguments in calls_of(message):
        given = arguments if isinstance(arguments, dict) else {}
        numbers = [given[name] for name in _NUMBERS if type(given.get(name)) is int and given[name] >= 0]
        for name in _BOXES:
            if (box := _numbers(given.get(name), 4)) is not None:
                yield (box[0], box[1], box[2], box[3]), numbers[0] if numbers else 0


def _reported_box(message: dict[str, Any]) -> Iterator[tuple[Box, int]]:
    """Yield the box that `image_tools` reports, as shares of a task's image, and the number of that image."""
    info = message.get("info")
    given = info if isinstance(info, dict) else {}
    box, size, number = _numbers(given.get("box"), 4), _numbers(given.get("size"), 2), given.get("of")
    if box is None or size is None or min(size) <= 0 or type(number) is not int or number < 0:
        return  # info of another tool
    left, top, right, bottom = (edge / size[axis % 2] for axis, edge in enumerate(box))
    if 0 <= left < right <= 1 and 0 <= top < bottom <= 1:
        yield (left, top, right, bottom), number


def _reported_points(info: Any) -> list[Place]:
    """Return the points where a screen reports that it acted, from the info of a result."""
    given = info if isinstance(info, dict) else {}
    size, places = _numbers(given.get("size"), 2), given.get("places")
    if size is None or min(size) <= 0 or not isinstance(places, list):
        return []
    numbers = [found for place in places if (found := _numbers(place, 2)) is not None]
    return _within([(x / size[0], y / size[1]) for x, y in numbers])


def _places_asked(run: Run, url: str, call: dict[str, Any], coordinates: Coordinates) -> list[Place]:
    """Return the points in a call's arguments, in the image at `url`; none if its full size is unknown."""
    [(_, given)] = calls_of({"tool_calls": [call]})
    if not isinstance(given, dict) or coordinates is Coordinates.PIXELS:
        return []
    stated = [_numbers(given.get(name), 2) for name in _PLACES]
    stated += [_numbers([given.get(across), given.get(down)], 2) for across, down in _SIDES]
    places = [place for place in stated if place is not None]
    units = _units(run, url, coordinates) if places else None
    return [] if units is None else _within([(x / units[0], y / units[1]) for x, y in places])


def _within(places: list[Place]) -> list[Place]:
    return [place for place in places if all(0 <= share <= 1 for share in place)]


def _numbers(value: Any, count: int) -> list[float] | None:
    if not isinstance(value, list) or len(value) != count or any(type(one) not in (int, float) for one in value):
        return None
    return value


def _box_share(run: Run, url: str, box: Box, coordinates: Coordinates) -> Box | None:
    """Return a model's box as shares of the image, clipped to it; None if it is outside of the image."""
    units = _units(run, url, coordinates)
    if units is None:
        return None
    left, top, right, bottom = (min(max(edge / units[axis % 2], 0.0), 1.0) for axis, edge in enumerate(box))
    return (left, top, right, bottom) if left < right and top < bottom else None


def _units(run: Run, url: str, coordinates: Coordinates) -> tuple[int, int] | None:
    """Return the width and height of an image in the model's units; None if it cannot be read."""
    if coordinates is not Coordinates.RESIZED:
        return (1, 1) if coordinates is Coordinates.RELATIVE1 else (1000, 1000)
    try:
        # the image is stored in the size that the model got
        return Image.open(BytesIO(read_image(run, url)[1])).size
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def _coordinates(run: Run, source: Any) -> Coordinates:
    asked = run.coordinates(source)
    if asked in tuple(Coordinates):
        return Coordinates(asked)
    return STATED.get(_model_type(run), Coordinates.RELATIVE1000)


def _model_type(run: Run) -> str:
    found = run.model_file("config.json")
    try:
        return str(read_json(*found).get("model_type")) if found else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        run.note_unreadable(error)
        return ""
