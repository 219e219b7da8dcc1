"""The part of an image that a box stands for, with boxes that no model could see made larger."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentfactory.tools.images.coordinates import Size

MOST_ASPECT = 100
"""Largest ratio of a part's sides: half of what models are shown at all."""

PixelBox = tuple[int, int, int, int]
"""Left, top, right and bottom edge, in pixels."""


@dataclass(frozen=True)
class Part:
    """A part of an image, and what a model is told of how it differs from the box that it asked for."""

    box: PixelBox
    notes: tuple[str, ...] = ()
    """Ends of sentences that begin with the box."""


def part_of(box: Sequence[float], size: Size, least: int = 1, most_aspect: float = math.inf) -> Part:
    """Return the pixels of a box (left, top, right, bottom) within an image: cut to it, rounded to whole pixels, and
    grown around its middle, as far as the image goes, to `least` pixels on a side, and at most `most_aspect` times as
    long as wide. Raises ValueError, for a model, if it is no box or has nothing of the image."""
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
    """Return whether intervals are the same to half a pixel: a model may round."""
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= 0.5 for first, second in pairs for a, b in zip(first, second, strict=True))


def _grown(interval: tuple[int, int], least: int, side: int) -> tuple[int, int]:
    """Return an interval with a length of at least `least`, moved into 0 to `side`, which may be shorter."""
    first, last = interval
    length = min(side, max(least, last - first))
    if length == last - first:
        return interval
    start = min(max((first + last - length) // 2, 0), side - length)
    return start, start + length
