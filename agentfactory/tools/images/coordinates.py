"""Coordinates in images, and their sizes for models: tasks use pixels of the file, each model its own convention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from PIL import Image

from agentfactory.base.messages import ToolSpec

Size = tuple[int, int]
PLACEHOLDER = "{coordinates}"
"""Placeholder in the description of a tool or its arguments, replaced with the model's coordinate convention."""
VIEW_FIELD = "model_view"
"""The field of a task that gives tools a ModelView."""
MOST_ASPECT = 200
_TOKEN = 28
"""Side of an image token in pixels, if the model's is unknown."""


@dataclass(frozen=True)
class SizeRule:
    """The resizing of images by models like Qwen's (arXiv:2409.12191, section 2.1) and GLM's (arXiv:2507.01006)."""

    token: int
    min_pixels: int
    max_pixels: int
    grows: bool = False
    """True to enlarge the whole image if a side is shorter than a token (GLM); False to enlarge only that side."""

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image like the model's own processor, which then leaves it unchanged. Raises ValueError."""
        size = self.fitted(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return an image's (width, height) for the model: multiples of `token` within bounds. Raises ValueError."""
        tried = [self._fitted(width, height)]
        # a narrow image may still be too large: the server would resize it again
        while (again := self._fitted(*tried[-1])) != tried[-1]:
            if again in tried:
                problem = f"no size near that has from {self.min_pixels} to {self.max_pixels} pixels in whole tokens"
                fix = "set model.max_image_pixels to at least twice model.min_image_pixels"
                raise ValueError(f"the image has {width} x {height} pixels, and {problem}; {fix}")
            tried.append(again)
        return again

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that transformers' processor gives an image (its `smart_resize`)."""
        factor = self.token
        if self.grows and min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > MOST_ASPECT * min(width, height):
            problem = f"one side may be at most {MOST_ASPECT} times the other"
            raise ValueError(f"the image has {width} x {height} pixels, and {problem}")
        sides = [round(side / factor) * factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]


class Coordinates(StrEnum):
    """A model's coordinate convention. x begins at the left edge of an image, y at the top."""

    PIXELS = "pixels"
    """Pixels of the full-size image."""
    RESIZED = "resized"
    """Pixels of the resized image that the model gets."""
    RELATIVE1000 = "relative1000"
    """From 0 to 1000 along each side of the image."""
    RELATIVE1 = "relative1"
    """From 0 to 1 along each side of the image."""


_WORDS = {
    Coordinates.PIXELS: "in pixels of the image in full size",
    Coordinates.RESIZED: "in pixels of the image as you see it",
    Coordinates.RELATIVE1000: "from 0 to 1000 of the image's width and height",
    Coordinates.RELATIVE1: "from 0 to 1 of the image's width and height",
}


@dataclass(frozen=True)
class ModelView:
    """A model's coordinates and image resizing: `model_view` of a task to tools (see `of`), an argument of rewards."""

    coordinates: Coordinates = Coordinates.PIXELS
    sizes: SizeRule | None = None
    """The model's resizing rule; None if unknown, which `resized` does not allow."""

    def __post_init__(self) -> None:
        if self.coordinates is Coordinates.RESIZED and self.sizes is None:
            raise ValueError("coordinates: got resized, but the model's resizing of images is unknown")

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """Create it from a task's `model_view`. None (no model) means pixels of the file."""
        if given is None:
            return cls()
        sizes = given["sizes"]
        return cls(Coordinates(given["coordinates"]), None if sizes is None else SizeRule(**sizes))

    def to_json(self) -> dict[str, Any]:
        return {"coordinates": self.coordinates.value, "sizes": None if self.sizes is None else asdict(self.sizes)}

    @property
    def token(self) -> int:
        return _TOKEN if self.sizes is None else self.sizes.token

    @property
    def words(self) -> str:
        return _WORDS[self.coordinates]

    @property
    def needs_sizes(self) -> bool:
        """True if the prompt must give the model image sizes, which it cannot infer."""
        return self.coordinates is Coordinates.PIXELS

    def shown(self, image: Image.Image) -> Image.Image:
        """Return an RGB image in the size that the model gets, if that is known. Raises ValueError."""
        return image if self.sizes is None else self.sizes.fit(image)

    def to_pixels(self, places: Sequence[float], size: Size) -> list[float]:
        """Convert x, y, x, y, ... from the model's coordinates to pixels of an image of the full size `size`."""
        return _converted(places, self._units(size), size)

    def from_pixels(self, places: Sequence[float], size: Size) -> list[float]:
        """Convert x, y, x, y, ... from pixels of an image of the full size `size` to the model's coordinates."""
        return _converted(places, size, self._units(size))

    def point_in(self, point: Sequence[float], size: Size) -> tuple[float, float]:
        """Convert a point (x, y) from the model's coordinates to pixels of an image of the full size `size`. Raises
        ValueError, for the model to read, if it is outside."""
        x, y = self.to_pixels(point, size)
        width, height = size
        if not (-0.5 <= x <= width + 0.5 and -0.5 <= y <= height + 0.5):
            raise ValueError(f"got {list(point)}, outside of the image, which ends at {self.stated(size, size)}")
        return min(max(x, 0), width), min(max(y, 0), height)

    def stated(self, places: Sequence[float], size: Size) -> list[float]:
        """Return `from_pixels`, rounded as the model would."""
        digits = 3 if self.coordinates is Coordinates.RELATIVE1 else None
        return [round(number, digits) for number in self.from_pixels(places, size)]

    def _units(self, size: Size) -> Size:
        match self.coordinates:
            case Coordinates.PIXELS:
                return size
            case Coordinates.RELATIVE1000:
                return 1000, 1000
            case Coordinates.RELATIVE1:
                return 1, 1
            case Coordinates.RESIZED:
                assert self.sizes is not None
                return self.sizes.fitted(*size)


def stating(spec: ToolSpec, view: ModelView) -> ToolSpec:
    """Fill in a tool's description with the model's coordinate convention."""

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(PLACEHOLDER, view.words)
        if isinstance(value, dict):
            return {key: put(one) for key, one in value.items()}
        return [put(one) for one in value] if isinstance(value, list) else value

    return replace(spec, description=put(spec.description), parameters=put(spec.parameters))


def _converted(places: Sequence[float], given: Size, wanted: Size) -> list[float]:
    if len(places) % 2:
        raise ValueError(f"got {len(places)} numbers; a place has two, x and y")
    # multiply first: products of whole numbers are exact, so half pixels round correctly
    return [place * wanted[axis % 2] / given[axis % 2] for axis, place in enumerate(places)]
