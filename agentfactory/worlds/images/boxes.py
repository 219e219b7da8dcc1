"""Conversion of a model's bounding box to pixels; boxes too small for the vision tower are enlarged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentfactory.tools.images.coordinates import Size

MOST_ASPECT = 100
"""Maximum aspect ratio of a part: half the maximum of any image shown to a model."""

PixelBox = tuple[int, int, int, int]
"""Left, top, right and bottom edge in pixels."""


@dataclass(frozen=True)
class Part:
    """A part of an image, with notes to the model on differences from the requested box."""

    box: PixelBox
    notes: tuple[str, ...] = ()
    """Predicates of sentences whose subject is the box."""


def part_of(box: Sequence[float], size: Size, least: int = 1, most_aspect: float = math.inf) -> Part:
    """Convert a box (left, top, right, bottom) to whole pixels of an image: clip it, then grow it around its center, as
    far as the image allows, to at least `least` pixels per side and an aspect ratio of at most `most_aspect`. Raises
    ValueError, with a message for the model, if it is not a box or lies outside the image."""
    if len(box) != 4:
        raise ValueError(f"a box has four numbers, left, top, right and bottom, and this one {len(box)}")
    if box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError("left has to be less than right, and top less than bottom")
    sides = [(box[axis], box[axis + 2]) for axis in (0, 1)]
    inside = [(max(first, 0), min(last, side)) for (first, last), side in zip(sides, size, strict=True)]
    if any(first >= last for first, last in inside):
        raise ValueError("the box has nothing of the image")
    notes = [] if _near(sides, inside) else ["reached out of the image, and was cut to it"]
    whole = [(round(first), round(last)) for first, last in inside]
    seen = [_grown(interval, least, side) for interval, side in zip(whole, size, strict=True)]
    if seen != whole:
        notes.append("was too small to be seen, and was enlarged")
    longest = max(last - first for first, last in seen)
    bounded = [
        _grown(interval, math.ceil(longest / most_aspect), side) for interval, side in zip(seen, size, strict=True)
    ]
    if bounded != seen:
        notes.append("was too narrow to be seen, and was widened")
    (left, right), (top, bottom) = bounded
    return Part((left, top, right, bottom), tuple(notes))


def _near(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Return whether intervals are equal within half a pixel, as models may round."""
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= 0.5 for first, second in pairs for a, b in zip(first, second, strict=True))


def _grown(interval: tuple[int, int], least: int, side: int) -> tuple[int, int]:
    """Grow an interval to a length of at least `least` and shift it into 0 to `side`, which limits its length."""
    first, last = interval
    length = min(side, max(least, last - first))
    if length == last - first:
        return interval
    start = min(max((first + last - length) // 2, 0), side - length)
    return start, start + length
