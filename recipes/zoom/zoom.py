"""`Zoom`: shows a part of the task's image as it is, where the model got the whole one reduced."""

from typing import Any

from PIL import Image

from agentfactory.rollout.images.decode import decode
from agentfactory.tools.environment import Environment
from agentfactory.tools.tool import tool

SCALE = 1000
"""A model of Qwen3-VL's kind gives places as if each side of an image were this long."""
LEAST = 32
"""Shortest side of what is shown, in pixels of the image: a smaller box grows."""


class Zoom(Environment):
    """Keeps the images of the data row's `images` as they are; a rule of the recipe judges the answer."""

    def __init__(self) -> None:
        self._images: list[Image.Image] = []

    def reset(self, images: list[Any], **task: Any) -> None:
        """Take the row's images. Raises ValueError if one cannot be decoded."""
        self._images = [decode(image) for image in images]

    @tool
    def zoom(self, bbox_2d: list[float], img_idx: int = 0) -> Any:
        """Look at a part of an image from near.

        Args:
            bbox_2d: The part as [left, top, right, bottom], each from 0 to 1000.
            img_idx: Number of the image among those of the task, from 0.
        """
        if not 0 <= img_idx < len(self._images):
            there = f"the images 0 to {len(self._images) - 1}" if self._images else "no images"
            raise ValueError(f"img_idx: got {img_idx}; there are {there}")
        whole = self._images[img_idx]
        return whole.crop(pixels_of(bbox_2d, whole.size))

    def release(self) -> None:
        """Forget the images."""
        self._images = []


def pixels_of(box: list[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the pixels of a box within an image of this (width, height), at least LEAST on a side if the image has as
    many. Raises ValueError if it is no box."""
    if len(box) != 4:
        raise ValueError(f"bbox_2d: got {len(box)} numbers; give left, top, right, bottom")
    edges = [min(max(edge, 0), SCALE) for edge in box]
    if edges[0] >= edges[2] or edges[1] >= edges[3]:
        raise ValueError(f"bbox_2d: got {box}; left has to be less than right, and top less than bottom")
    (left, right), (top, bottom) = (
        _grown(edges[axis] * side / SCALE, edges[axis + 2] * side / SCALE, side) for axis, side in enumerate(size)
    )
    return left, top, right, bottom


def _grown(first: float, last: float, side: int) -> tuple[int, int]:
    """Return the nearest pixels of an interval, moved and grown to at least LEAST of `side`."""
    length = min(side, max(LEAST, round(last) - round(first)))
    start = round(first) if length == round(last) - round(first) else round((first + last - length) / 2)
    start = min(max(start, 0), side - length)
    return start, start + length
