"""Rewards for boxes and points in images: of rows in pixels of the file, of predictions in the model's coordinates."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agentfactory.base.messages import is_finite_number
from agentfactory.rollout.rewards.answers import Answers, hit_or_miss
from agentfactory.rollout.rewards.reward_spec import RewardError, reward
from agentfactory.rollout.rewards.text import OPTIONS, field_of
from agentfactory.tools.images.coordinates import ModelView
from agentfactory.tools.images.decode import size_of

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
Share = Annotated[float, Field(gt=0, le=1)]

_PAIR = r"(-?\d{1,9}(?:\.\d{1,9})?)\s{0,9},\s{0,9}(-?\d{1,9}(?:\.\d{1,9})?)"
_OPEN, _CLOSE = r"[\[(]\s{0,9}", r"\s{0,9}[\])]"
_BETWEEN = rf"(?:{_CLOSE}\s{{0,9}},\s{{0,9}}{_OPEN}|\s{{0,9}},\s{{0,9}})"
_BOX = re.compile(rf"{_OPEN}{_PAIR}{_BETWEEN}{_PAIR}{_CLOSE}")
_POINT = re.compile(rf"{_OPEN}{_PAIR}{_CLOSE}")


def iou(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (_area(one) + _area(other) - shared)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def read_box(text: str) -> Box | None:
    """Return the last box in a text, written as [left, top, right, bottom] or (left, top), (right, bottom), if any."""
    found = _BOX.findall(text)
    if not found:
        return None
    left, top, right, bottom = map(float, found[-1])
    return left, top, right, bottom


def read_point(text: str) -> tuple[float, float] | None:
    """Return the last point in a text, as [x, y] or (x, y), or the centre of its last box; None if there is neither."""
    if (box := read_box(text)) is not None:
        return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    found = _POINT.findall(text)
    return (float(found[-1][0]), float(found[-1][1])) if found else None


@dataclass(config=OPTIONS)
class Places(Answers):
    """The options of rewards for the last box or point in the prediction, in the image of this index."""

    field: str = "box"
    """Field of the row: the box in pixels of the image's file, as [left, top, right, bottom], or a list of boxes."""
    image: Annotated[int, Field(ge=0)] = 0

    def check(self, row: dict[str, Any]) -> None:
        super().check(row)
        self._image(row)

    def _accepted(self, row: dict[str, Any]) -> list[Box]:
        given = field_of(row, self.field)
        several = given if given and all(isinstance(box, Sequence) for box in given) else [given]
        boxes: list[Any] = [tuple(box) for box in several if isinstance(box, Sequence) and not isinstance(box, str)]
        fit = (
            len(box) == 4 and all(map(is_finite_number, box)) and box[0] < box[2] and box[1] < box[3] for box in boxes
        )
        if not boxes or not all(fit):
            form = f"[left, top, right, bottom] in the field {self.field!r}, or a list of these"
            raise ValueError(f"needs {form}, not {given!r}")
        return boxes

    def _image(self, row: dict[str, Any]) -> Any:
        images = field_of(row, "images")
        if self.image >= len(images):
            raise ValueError(f"needs image {self.image} of the row, which has {len(images)}")
        return images[self.image]

    def _pixels(self, places: Sequence[float], view: ModelView | None, row: dict[str, Any]) -> list[float]:
        if view is None:
            raise RewardError("the model's coordinate system is unknown; fix: set rollout.coordinates")
        return view.to_pixels(places, size_of(self._image(row)))


@reward
@dataclass(config=OPTIONS)
class BoxIou(Places):
    """The intersection over union of the predicted box and the row's, from 0 to 1; metrics `iou` and `success`."""

    threshold: Share = 0.5
    binary: bool = False
    """Return 1 for a success and 0 otherwise, instead of the IoU."""

    def __call__(self, prediction: str, model_view: ModelView | None, **row: Any) -> dict[str, float]:
        box = read_box(self._found(prediction))
        best = 0.0
        if box is not None:
            left, top, right, bottom = self._pixels(box, model_view, row)
            if left < right and top < bottom:
                best = max(iou((left, top, right, bottom), accepted) for accepted in self._accepted(row))
        success = float(best >= self.threshold)
        return {"reward": success if self.binary else best, "iou": best, "success": success}


@reward
@dataclass(config=OPTIONS)
class PointInBox(Places):
    """1 if the predicted point, or the centre of the predicted box, is in the row's box, else 0; metric `success`."""

    def __call__(self, prediction: str, model_view: ModelView | None, **row: Any) -> dict[str, float]:
        point = read_point(self._found(prediction))
        hit = False
        if point is not None:
            x, y = self._pixels(point, model_view, row)
            hit = any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in self._accepted(row))
        return hit_or_miss(hit)
