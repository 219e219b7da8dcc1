"""Models whose images are left to their own processor, which a server runs, too: tiles, rows with marks at their ends,
and whatever else stands for an image comes from there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from agentfactory.rollout.images.vision import Grid, Vision
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.errors import SettingError

_SMALL = 64
"""Side in pixels of an image with few tokens: most processors enlarge it to one tile."""


def load_own_processor(path: str) -> Any:
    """Return the processor of a model, of text and images. Raises SettingError if transformers cannot load it."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        problem = f"the processor of {path}, which makes tokens of its images, cannot be loaded: {error}"
        raise SettingError("model.path", problem, "install what is missing, or add the files of the model") from error


@dataclass(frozen=True)
class OwnProcessor(Vision):
    """How many tokens an image takes, and what is around and between them, follows from its size alone."""

    processor: Any
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Limits on the area of an image before the processor gets it."""
    _ids: Callable[[Grid], Sequence[int]] = field(init=False, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        token = self.processor.image_token
        if self.processor.tokenizer.convert_tokens_to_ids(token) != self.image_token_id:
            problem = f"the processor writes images as {token}, and config.json has the id {self.image_token_id}"
            raise SettingError("model.path", problem, "add the files of the original model")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            problem = f"got {self.max_pixels}, less than the {self.min_pixels} of the smallest"
            raise SettingError("model.max_image_pixels", problem, "raise it")
        object.__setattr__(self, "_ids", lru_cache(1024)(self._expansion))

    def fit(self, image: Image.Image) -> Image.Image:
        """Return an image within the limits; its size is kept if there are none. Raises ValueError if the processor
        refuses the size."""
        area = image.width * image.height
        scale = 1.0
        if self.max_pixels is not None and area > self.max_pixels:
            scale = math.sqrt(self.max_pixels / area)
        elif self.min_pixels is not None and area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
        # rounded such that the limit is kept
        turn = math.floor if scale < 1 else math.ceil
        size = max(1, turn(image.width * scale)), max(1, turn(image.height * scale))
        # transformers' Mistral 3 fails on a single token
        while list(self.ids((1, size[1], size[0]))).count(self.image_token_id) == 1 and max(size) < _SMALL:
            size = 2 * size[0], 2 * size[1]
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def check(self, width: int, height: int) -> None:
        """See Vision."""
        self.ids((1, height, width))

    def grid(self, image: Image.Image) -> Grid:
        """Return the height and width of an image in pixels, as Grid."""
        return 1, image.height, image.width

    def ids(self, grid: Grid) -> Sequence[int]:
        """See Vision. Raises ValueError if the processor refuses the size."""
        return self._ids(grid)

    def _expansion(self, grid: Grid) -> tuple[int, ...]:
        try:
            return tuple(self.process(self.blank(grid))[0])
        except (ValueError, ZeroDivisionError) as error:
            problem = f"the image has {grid[2]} x {grid[1]} pixels, which the model's processor refuses: {error}"
            raise ValueError(problem) from error

    def process(self, image: Image.Image) -> tuple[list[int], dict[str, Any]]:
        """Return the ids that stand for an image, and what the network gets of it, as the processor makes them."""
        text = [self.processor.image_token]
        # tokenizers refuse to be called by several threads
        with self._lock:
            made = self.processor(text=text, images=[image], add_special_tokens=False, return_tensors="pt")
        ids: list[int] = made["input_ids"][0].tolist()
        return ids, {name: value for name, value in made.items() if name not in _OF_TEXT}

    def smallest(self) -> Grid:
        """See Vision."""
        return 1, _SMALL, _SMALL

    def blank(self, grid: Grid) -> Image.Image:
        """See Vision."""
        return Image.new("RGB", (grid[2], grid[1]))

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray | None:
        """See Vision: tokens are counted."""
        return None


_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor that do not describe images."""
