"""Derived images of a chain, and the mapping of their coordinates back to the originals."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageEnhance

from agentfactory.tools.images.coordinates import Size
from agentfactory.tools.images.decode import decode, is_path
from agentfactory.tools.images.lru_cache import ByteCache

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


Point = tuple[float, float]
"""x and y in pixels from the image's upper left corner."""
_KEPT_BYTES = 512 << 20
"""Bytes of pixels that a process caches for its chains; evicted images are recomputed on demand."""


@dataclass(frozen=True)
class Way:
    """An affine map from points of one image to another: (x, y) -> (a x + b y + c, d x + e y + f)."""

    a: float = 1.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    e: float = 1.0
    f: float = 0.0

    def of(self, point: Point) -> Point:
        x, y = point
        return self.a * x + self.b * y + self.c, self.d * x + self.e * y + self.f

    def then(self, other: "Way") -> "Way":
        """Return the composition: this map, then `other`."""
        c, f = other.of((self.c, self.f))
        return Way(
            other.a * self.a + other.b * self.d,
            other.a * self.b + other.b * self.e,
            c,
            other.d * self.a + other.e * self.d,
            other.d * self.b + other.e * self.e,
            f,
        )


class Step(ABC):
    """A transformation of an image. Steps are compared by value."""

    @abstractmethod
    def apply(self, image: Image.Image) -> Image.Image:
        """Return the transformed image."""

    def back(self, size: Size) -> Way:
        """Return the map from the transformed image back to its source, which has this size."""
        return Way()


@dataclass(frozen=True)
class Crop(Step):
    box: PixelBox

    def apply(self, image: Image.Image) -> Image.Image:
        return image.crop(self.box)

    def back(self, size: Size) -> Way:
        return Way(c=self.box[0], f=self.box[1])


@dataclass(frozen=True)
class Turn(Step):
    """A clockwise rotation about the center. The canvas grows to hold the whole image; its corners are white."""

    degrees: float

    def apply(self, image: Image.Image) -> Image.Image:
        if self.degrees % 90 == 0:
            return _QUARTERS[int(self.degrees % 360) // 90](image)
        way = self.back(image.size)
        numbers = (way.a, way.b, way.c, way.d, way.e, way.f)
        size = self._size(image.size)
        return image.transform(
            size, Image.Transform.AFFINE, numbers, Image.Resampling.BICUBIC, fillcolor=(255, 255, 255)
        )

    def back(self, size: Size) -> Way:
        sine, cosine = self._sine_cosine()
        (width, height), (new_width, new_height) = size, self._size(size)
        # y points down, so this rotates counterclockwise: back
        turned = Way(cosine, sine, 0.0, -sine, cosine, 0.0)
        x, y = turned.of((new_width / 2, new_height / 2))
        return Way(cosine, sine, width / 2 - x, -sine, cosine, height / 2 - y)

    def _size(self, size: Size) -> Size:
        sine, cosine = map(abs, self._sine_cosine())
        width, height = size
        # rounding errors must not add a pixel
        across, down = width * cosine + height * sine, width * sine + height * cosine
        return math.ceil(across - 1e-6), math.ceil(down - 1e-6)

    def _sine_cosine(self) -> tuple[float, float]:
        if self.degrees % 90 == 0:
            return ((0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0))[int(self.degrees % 360) // 90]
        return math.sin(math.radians(self.degrees)), math.cos(math.radians(self.degrees))


_QUARTERS = (
    lambda image: image.copy(),
    lambda image: image.transpose(Image.Transpose.ROTATE_270),
    lambda image: image.transpose(Image.Transpose.ROTATE_180),
    lambda image: image.transpose(Image.Transpose.ROTATE_90),
)
"""Clockwise rotations by 0, 90, 180 and 270 degrees."""

Direction = Literal["left_right", "top_bottom"]


@dataclass(frozen=True)
class Flip(Step):
    direction: Direction

    def apply(self, image: Image.Image) -> Image.Image:
        across = self.direction == "left_right"
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT if across else Image.Transpose.FLIP_TOP_BOTTOM)

    def back(self, size: Size) -> Way:
        if self.direction == "left_right":
            return Way(a=-1.0, c=size[0])
        return Way(e=-1.0, f=size[1])


@dataclass(frozen=True)
class Contrast(Step):
    """A contrast change: multiplies each pixel's distance from the mean grey."""

    factor: float

    def apply(self, image: Image.Image) -> Image.Image:
        return ImageEnhance.Contrast(image).enhance(self.factor)


@dataclass(frozen=True)
class Draw(Step):
    """Boxes or discs at points drawn into the image, all in the same colour."""

    colour: str
    boxes: tuple[PixelBox, ...] = ()
    points: tuple[Point, ...] = ()

    def apply(self, image: Image.Image) -> Image.Image:
        drawn = image.copy()
        pencil = ImageDraw.Draw(drawn)
        # thick lines, because the model may get a downscaled image
        width = max(2, round(min(image.size) / 150))
        for left, top, right, bottom in self.boxes:
            pencil.rectangle((left, top, right - 1, bottom - 1), outline=self.colour, width=width)
        for x, y in self.points:
            pencil.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=self.colour)
        return drawn


class Picture:
    """An image of a chain, from a source or by a step from another one. A process caches computed pixels."""

    def __init__(self, source: Any, number: int) -> None:
        """Image `number` of the chain, from a source of `decode`. Raises ValueError if its file does not exist."""
        self.origin = number
        """The chain's number of the original image."""
        self._source = source
        self._before: Picture | None = None
        self._steps: tuple[Step, ...] = ()
        self._key: Hashable = next(_numbers)
        self._size: Size | None = None
        if is_path(source):
            path = Path(str(source).removeprefix("file://"))
            try:
                status = path.stat()
            except OSError as error:
                raise ValueError(f"the image {path} cannot be read: {error.strerror}") from error
            self._key = str(path.absolute()), status.st_mtime_ns, status.st_size

    def changed(self, step: Step) -> "Picture":
        after = copy(self)
        after._before, after._steps, after._size = self, (*self._steps, step), None
        return after

    def pixels(self) -> Image.Image:
        """Return the full-size RGB image, which must not be modified. Raises ValueError if it cannot be decoded."""
        key = self._key, self._steps
        with _lock:
            found = _kept.get(key)
        if found is None:
            found = decode(self._source) if self._before is None else self._steps[-1].apply(self._before.pixels())
            with _lock:
                if _kept.get(key) is None:
                    _kept.put(key, found, 3 * found.width * found.height)
        self._size = found.size
        return found

    @property
    def size(self) -> Size:
        return self._size or self.pixels().size

    @property
    def back(self) -> Way:
        """The map from points of this picture to the original image."""
        if self._before is None:
            return Way()
        return self._steps[-1].back(self._before.size).then(self._before.back)

    @property
    def first(self) -> "Picture":
        return self if self._before is None else self._before.first

    def box_in_first(self) -> list[float]:
        """Return the smallest axis-aligned box that contains everything shown here of the original image."""
        if self._before is None:
            return [0.0, 0.0, *map(float, self.size)]
        around = self._before.box_in_first()
        if not isinstance(self._steps[-1], Crop):
            return around
        width, height = self.size
        corners = [self.back.of((x, y)) for x in (0, width) for y in (0, height)]
        limits = [(min(along), max(along)) for along in zip(*corners, strict=True)]
        box = [limits[0][0], limits[1][0], limits[0][1], limits[1][1]]
        # a part of a rotated picture may extend into the white corners
        return [round(min(max(edge, around[n % 2]), around[2 + n % 2]), 2) for n, edge in enumerate(box)]


_kept: ByteCache[Hashable, Image.Image] = ByteCache(_KEPT_BYTES)
_lock = Lock()
_numbers = count()
