"""Image processing by a model's own processor, which servers run too: it determines tiles, separators and all other
tokens of an image."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.vision import Grid, Vision
from agentfactory.rollout.model_hub import load_fault
from agentfactory.rollout.token_row import ImageSpan

_SMALL = 64
"""Side in pixels of a small image with few tokens; most processors enlarge it to one tile."""


def load_own_processor(path: str) -> Any:
    """Return a model's processor of text and images. Raise SettingError if transformers cannot load it."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        problem = f"the processor of {path}, which converts images to tokens, cannot be loaded: {load_fault(error)}"
        raise SettingError("model.path", problem, "install what is missing, or add the files of the model") from error


@dataclass(frozen=True)
class OwnProcessor(Vision):
    """Image processing by a model's own processor. An image's tokens, and those around and between them, depend only on
    its size."""

    processor: Any
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Limits on the area of an image before the processor gets it."""
    _ids: Callable[[Grid], Sequence[int]] = field(init=False, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        token = self.processor.image_token
        if self.processor.tokenizer.convert_tokens_to_ids(token) != self.image_token_id:
            problem = f"the processor's image token is {token}, but config.json has the id {self.image_token_id}"
            raise SettingError("model.path", problem, "add the files of the original model")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            problem = f"got {self.max_pixels}, less than the minimum of {self.min_pixels}"
            raise SettingError("model.max_image_pixels", problem, "raise it")
        object.__setattr__(self, "_ids", lru_cache(1024)(self._expansion))

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an image to the limits, if there are any. Raise ValueError if the processor refuses the size."""
        area = image.width * image.height
        scale = 1.0
        if self.max_pixels is not None and area > self.max_pixels:
            scale = math.sqrt(self.max_pixels / area)
        elif self.min_pixels is not None and area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
        # round such that the limit holds
        turn = math.floor if scale < 1 else math.ceil
        size = max(1, turn(image.width * scale)), max(1, turn(image.height * scale))
        # transformers' Mistral 3 fails on an image of a single token
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
        """See Vision. Raise ValueError if the processor refuses the size."""
        return self._ids(grid)

    def _expansion(self, grid: Grid) -> tuple[int, ...]:
        try:
            return tuple(self.process(self.blank(grid))[0])
        except (ValueError, ZeroDivisionError) as error:
            problem = f"the image has {grid[2]} x {grid[1]} pixels, which the model's processor refuses: {error}"
            raise ValueError(problem) from error

    def process(self, image: Image.Image) -> tuple[list[int], dict[str, Any]]:
        """Return the processor's token ids for an image, and the inputs of the network for it."""
        text = [self.processor.image_token]
        # tokenizers refuse concurrent calls
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
        """See Vision. Return None: positions are one-dimensional."""
        return None


_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor that do not describe images."""
