"""Places in images: a task states them in pixels of the file, and each model in the way that it has learned."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from PIL import Image

from agentfactory.tools.images.sizes import SizeRule
from agentfactory.tools.messages import ToolSpec

Size = tuple[int, int]
"""Width and height in pixels."""
PLACEHOLDER = "{coordinates}"
"""In the description of a tool or of its arguments: replaced by how the model states places."""
VIEW_FIELD = "model_view"
"""The field of a task in which tools get a ModelView."""
_TOKEN = 28
"""Side of a token in pixels where it is not known."""


class Coordinates(StrEnum):
    """The numbers by which a model states a place in an image. x begins at the left edge, y at the top."""

    PIXELS = "pixels"
    """Pixels of the image in full size."""
    RESIZED = "resized"
    """Pixels of the image in the size that the model gets."""
    RELATIVE1000 = "relative1000"
    """From 0 to 1000 on each side of the image."""
    RELATIVE1 = "relative1"
    """From 0 to 1 on each side of the image."""


_WORDS = {
    Coordinates.PIXELS: "in pixels of the image in full size",
    Coordinates.RESIZED: "in pixels of the image as you see it",
    Coordinates.RELATIVE1000: "from 0 to 1000 of the image's width and height",
    Coordinates.RELATIVE1: "from 0 to 1 of the image's width and height",
}


@dataclass(frozen=True)
class ModelView:
    """How a model states places in images, and in which size it gets them.

    Tools get it as the field `model_view` of a task (see `of`), rewards as the argument `model_view`.
    """

    coordinates: Coordinates = Coordinates.PIXELS
    sizes: SizeRule | None = None
    """How the model resizes images; None if this is not known, as `resized` needs it to be."""

    def __post_init__(self) -> None:
        if self.coordinates is Coordinates.RESIZED and self.sizes is None:
            raise ValueError("coordinates: got resized, and it is not known how the model resizes images")

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """Create it from a task's `model_view`. None, without a model: a person states pixels of the file."""
        if given is None:
            return cls()
        sizes = given["sizes"]
        return cls(Coordinates(given["coordinates"]), None if sizes is None else SizeRule(**sizes))

    def to_json(self) -> dict[str, Any]:
        """Return the inverse of `of`."""
        return {"coordinates": self.coordinates.value, "sizes": None if self.sizes is None else asdict(self.sizes)}

    @property
    def token(self) -> int:
        """Side in pixels of what one token stands for."""
        return _TOKEN if self.sizes is None else self.sizes.token

    @property
    def words(self) -> str:
        """How the model states places, in words for it."""
        return _WORDS[self.coordinates]

    @property
    def needs_sizes(self) -> bool:
        """Whether the model has to be told how large images are, because it cannot see that."""
        return self.coordinates is Coordinates.PIXELS

    @property
    def is_fine(self) -> bool:
        """Whether whole numbers are too coarse to state places."""
        return self.coordinates is Coordinates.RELATIVE1

    def shown(self, image: Image.Image) -> Image.Image:
        """Return an RGB image in the size that the model gets, as far as it is known. Raises ValueError if it is too
        narrow to be shown."""
        return image if self.sizes is None else self.sizes.fit(image)

    def to_pixels(self, places: Sequence[float], size: Size) -> list[float]:
        """Convert x, y, x, y, ... that the model stated of an image of this full size to pixels of it. Raises
        ValueError for an odd number of them."""
        return _converted(places, self._units(size), size)

    def from_pixels(self, places: Sequence[float], size: Size) -> list[float]:
        """Convert x, y, x, y, ... in pixels of an image of this full size to what the model states. Raises ValueError
        for an odd number of them."""
        return _converted(places, size, self._units(size))

    def point_in(self, point: Sequence[float], size: Size) -> tuple[float, float]:
        """Return the pixels of a place (x, y) that the model stated of an image of this full size. Raises ValueError,
        for the model, if it is outside."""
        x, y = self.to_pixels(point, size)
        width, height = size
        # to half a pixel: a model may round
        if not (-0.5 <= x <= width + 0.5 and -0.5 <= y <= height + 0.5):
            raise ValueError(f"got {list(point)}, outside of the image, which ends at {self.stated(size, size)}")
        return min(max(x, 0), width), min(max(y, 0), height)

    def stated(self, places: Sequence[float], size: Size) -> list[float]:
        """Return `from_pixels`, rounded as the model would."""
        return [round(number, 3) if self.is_fine else round(number) for number in self.from_pixels(places, size)]

    def _units(self, size: Size) -> Size:
        """Return how many of the model's units are the width and the height of an image."""
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
    """Return the description of a tool with the way of stating places in it."""

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
    # the product first: of whole numbers it is exact, so that halves of pixels are rounded as they should be
    return [place * wanted[axis % 2] / given[axis % 2] for axis, place in enumerate(places)]
