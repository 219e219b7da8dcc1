"""Image sizes for models that cut images into tokens of equal size."""

import math
from dataclasses import dataclass

from PIL import Image

MOST_ASPECT = 200
"""Largest ratio of an image's sides."""


@dataclass(frozen=True)
class SizeRule:
    """The resizing of images by models like Qwen's (arXiv:2409.12191, section 2.1) and GLM's (arXiv:2507.01006)."""

    token: int
    """Side of an image token in pixels."""
    min_pixels: int
    """Smallest area of an image."""
    max_pixels: int
    """Largest area of an image."""
    grows: bool = False
    """True to enlarge the whole image if a side is shorter than a token (GLM); False to enlarge only that side."""

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image like the model's own processor, which then leaves it unchanged. Raises ValueError if it
        is too narrow."""
        size = self.fitted(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return an image's (width, height) for the model: multiples of `token`, an area from `min_pixels` to
        `max_pixels`, and nearly the same aspect ratio. Raises ValueError if the aspect ratio exceeds MOST_ASPECT, or if
        no such size exists, because `min_pixels` and `max_pixels` are too close."""
        size = self._fitted(width, height)
        tried = {size}
        # a narrow image may still be too large: the server would resize it again
        while (again := self._fitted(*size)) != size:
            if again in tried:
                raise ValueError(
                    f"the image has {width} x {height} pixels, and no size near that of whole tokens ({self.token} x "
                    f"{self.token}) has from {self.min_pixels} to {self.max_pixels} pixels; set "
                    "model.max_image_pixels to at least twice model.min_image_pixels"
                )
            size = again
            tried.add(size)
        return size

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that transformers' processor gives an image (its `smart_resize`)."""
        factor = self.token
        if self.grows and min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise ValueError(
                f"the image has {width} x {height} pixels, and one side may be at most {MOST_ASPECT} times the other"
            )
        sides = [round(side / factor) * factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]
