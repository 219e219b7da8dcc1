"""`ImageTools`: an environment with tools to zoom into, transform, mark and measure a task's images."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.images.coordinates import ModelView
from agentfactory.tools.tool import tool
from agentfactory.worlds.images import pictures
from agentfactory.worlds.images.pictures import Direction, Part, Picture, Point

Box = Annotated[list[float], Field(min_length=4, max_length=4)]
"""Left, top, right and bottom edge, in the model's coordinate convention."""
Place = Annotated[list[float], Field(min_length=2, max_length=2)]
"""x and y, in the model's coordinate convention."""
Colour = Literal["red", "green", "blue", "yellow", "cyan", "magenta", "black", "white"]


class ImageTools(Environment):
    """An environment with tools to crop, rotate, flip, enhance, mark and measure a task's images.

    A chain's images are numbered from 0: first the task's `images`, then each image that any tool has shown.
    Coordinates are in the model's convention (`rollout.coordinates`), relative to the image that the call names. A
    result's info has its own number (`image`), the number of the original image (`of`), the part of it that is shown
    (`box`, in pixels of the full-size original) and the original's `size`.

    It has no reward: set `rewards:` in the recipe.

    Args:
        labels: whether to state each new image's number before it; models trained to count images need no labels.
        least: minimum side of a part in pixels; smaller parts grow to it. null: the side of one image token.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, labels: bool = True, least: int | None = None) -> None:
        if least is not None and least < 1:
            raise ValueError(f"least: got {least}; it has to be at least 1")
        self._labels = labels
        self._least = least
        self._view = ModelView()
        self._pictures: list[Picture] = []

    def reset(self, images: list[Any], model_view: dict[str, Any] | None = None, **task: Any) -> str | None:
        """Begin with the row's images, as paths or anything else that `decode` accepts. Without `model_view`,
        coordinates are pixels. Raises ValueError if a file does not exist."""
        self._view = ModelView.of(model_view)
        self._pictures = [Picture(image, number) for number, image in enumerate(images)]
        if model_view is None or not (self._labels and self._view.needs_sizes):
            return None
        return "\n".join(f"Image {n} has {_sides(picture)} pixels." for n, picture in enumerate(self._pictures))

    @tool
    def zoom(self, bbox_2d: Box, img_idx: int = 0) -> Any:
        """Look at a part of an image from near.

        Args:
            bbox_2d: The part as [left, top, right, bottom], {coordinates}.
            img_idx: Number of the image, from 0.
        """
        picture = self._picture(img_idx)
        least = self._least or self._view.token
        part = self._part(bbox_2d, picture, "bbox_2d", least, pictures.MOST_ASPECT)
        return self._made(picture, pictures.Crop(part.box), self._notes(part, picture, "The box"))

    @tool
    def rotate(self, degrees: float, img_idx: int = 0) -> Any:
        """Turn an image clockwise.

        Args:
            degrees: How far, such as 90.
            img_idx: Number of the image, from 0.
        """
        return self._made(self._picture(img_idx), pictures.Turn(degrees % 360))

    @tool
    def flip(self, direction: Direction, img_idx: int = 0) -> Any:
        """Show an image as in a mirror.

        Args:
            direction: The sides that change places.
            img_idx: Number of the image, from 0.
        """
        return self._made(self._picture(img_idx), pictures.Flip(direction))

    @tool
    def enhance_contrast(self, factor: Annotated[float, Field(ge=0.1, le=10)] = 2.0, img_idx: int = 0) -> Any:
        """Show an image with another contrast.

        Args:
            factor: More than 1 for more contrast.
            img_idx: Number of the image, from 0.
        """
        return self._made(self._picture(img_idx), pictures.Contrast(factor))

    @tool
    def draw_boxes(
        self, boxes: Annotated[list[Box], Field(min_length=1, max_length=50)], img_idx: int = 0, color: Colour = "red"
    ) -> Any:
        """Draw boxes into an image.

        Args:
            boxes: Each as [left, top, right, bottom], {coordinates}.
            img_idx: Number of the image, from 0.
            color: Their color.
        """
        picture = self._picture(img_idx)
        parts = [self._part(box, picture, f"boxes.{number}") for number, box in enumerate(boxes)]
        notes = [note for number, part in enumerate(parts) for note in self._notes(part, picture, f"Box {number}")]
        return self._made(picture, pictures.Draw(color, boxes=tuple(part.box for part in parts)), notes)

    @tool
    def draw_points(
        self,
        points: Annotated[list[Place], Field(min_length=1, max_length=50)],
        img_idx: int = 0,
        color: Colour = "red",
    ) -> Any:
        """Mark points in an image.

        Args:
            points: Each as [x, y], {coordinates}.
            img_idx: Number of the image, from 0.
            color: Their color.
        """
        picture = self._picture(img_idx)
        found = [self._point(point, picture, f"points.{number}") for number, point in enumerate(points)]
        return self._made(picture, pictures.Draw(color, points=tuple(found)))

    @tool
    def measure(self, start: Place, end: Place, img_idx: int = 0) -> str:
        """Measure the distance of two points in an image.

        Args:
            start: One point as [x, y], {coordinates}.
            end: The other one.
            img_idx: Number of the image, from 0.
        """
        picture = self._picture(img_idx)
        (left, top), (right, bottom) = self._point(start, picture, "start"), self._point(end, picture, "end")
        across, down = right - left, bottom - top
        width, height = picture.size
        return (
            f"{math.hypot(across, down):.1f} pixels: {across:.1f} to the right and {down:.1f} down, of an image of "
            f"{width} x {height} pixels"
        )

    def take_images(self, images: list[str]) -> list[str]:
        """Number the images of other tools; return the text before each, empty for one that cannot be shown."""
        return [self._taken(image) for image in images]

    def _taken(self, image: str) -> str:
        picture = Picture(image, len(self._pictures))
        try:
            self._seen(picture)
        except ValueError:
            return ""
        return " ".join(self._named(self._add(picture), picture))

    def release(self) -> None:
        self._pictures = []

    def _picture(self, number: int) -> Picture:
        if not 0 <= number < len(self._pictures):
            there = f"the images 0 to {len(self._pictures) - 1}" if self._pictures else "no images"
            raise ValueError(f"img_idx: got {number}; there are {there}")
        return self._pictures[number]

    def _part(
        self, box: Sequence[float], picture: Picture, argument: str, least: int = 1, most_aspect: float = math.inf
    ) -> Part:
        try:
            return pictures.part_of(self._view.to_pixels(box, picture.size), picture.size, least, most_aspect)
        except ValueError as error:
            raise ValueError(f"{argument}: got {list(box)}: {error}") from None

    def _notes(self, part: Part, picture: Picture, name: str) -> list[str]:
        told = [f"{name} {note}." for note in part.notes]
        return [*told, f"It is {self._view.stated(part.box, picture.size)} now."] if told else []

    def _point(self, point: Sequence[float], picture: Picture, argument: str) -> Point:
        try:
            return self._view.point_in(point, picture.size)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None

    def _made(self, picture: Picture, step: pictures.Step, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return the result of a tool that derives a new image, and give that image the next number."""
        made = picture.changed(step)
        shown = self._seen(made)
        number = self._add(made)
        said = " ".join([*notes, *self._named(number, made)])
        place = {"image": number, "of": made.origin, "box": made.box_in_first(), "size": made.first.size}
        return {"observation": [said, shown] if said else shown, **place}

    def _seen(self, made: Picture) -> Image.Image:
        """Return the image at the size that the model gets."""
        return self._view.shown(made.pixels())

    def _add(self, made: Picture) -> int:
        self._pictures.append(made)
        return len(self._pictures) - 1

    def _named(self, number: int, picture: Picture) -> list[str]:
        size = f" ({_sides(picture)} pixels)" if self._view.needs_sizes else ""
        return [f"Image {number}{size}:"] if self._labels else []


def _sides(picture: Picture) -> str:
    return "{} x {}".format(*picture.size)
