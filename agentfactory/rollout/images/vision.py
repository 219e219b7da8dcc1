"""The image processing of a model: resizing, image tokens and their positions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.coordinates import SizeRule

Grid = tuple[int, int, int]
"""Size of an image in time (1), height and width: in patches, or in pixels for models of `own_processor`."""
BANNED_BIAS = -100.0
"""Bias that servers and trainer add to the logits of `Vision.banned_token_ids`."""


@dataclass(frozen=True)
class Vision(ABC):
    """Base class of the image processing of a model."""

    image_token_id: int
    """The image token: the chat template writes one per image, and each feature of an image replaces one."""
    banned_token_ids: tuple[int, ...]
    """Image and video tokens, which must not be sampled: they would refer to images that do not exist."""

    @property
    def sizes(self) -> SizeRule | None:
        """The rule by which images are resized; None if the model's own processor resizes them."""
        return None

    @abstractmethod
    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image for storage and for the model's processor, here and in the server. Raise ValueError if
        its size is not supported."""

    @abstractmethod
    def check(self, width: int, height: int) -> None:
        """Raise ValueError if an image of this size is not supported."""

    @abstractmethod
    def grid(self, image: Image.Image) -> Grid:
        """Return the grid of an image that `fit` returned."""

    @abstractmethod
    def ids(self, grid: Grid) -> Sequence[int]:
        """Return the token ids of an image: image tokens, and the model's tokens around and between them."""

    @abstractmethod
    def positions(self, length: int, spans: Sequence[ImageSpan]) -> Int[np.ndarray, "3 length"] | None:
        """Return the rotary positions in time, height and width of a row's tokens; None if positions are
        one-dimensional."""

    def server_options(self) -> dict[str, Any]:
        """Return the `mm_processor_kwargs` with which vLLM does not resize stored images, if the recipe has limits."""
        return {}

    @abstractmethod
    def smallest(self) -> Grid:
        """Return the grid of an image with few tokens."""

    @abstractmethod
    def blank(self, grid: Grid) -> Image.Image:
        """Return a black image with this grid."""

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image, including those around and between its image tokens."""
        return len(self.ids(grid))

    def features(self, grid: Grid) -> int:
        """Return the number of features of an image, one per image token."""
        return sum(i == self.image_token_id for i in self.ids(grid))

    def expand(self, ids: Sequence[int], images: Sequence[tuple[str, Grid]]) -> tuple[list[int], list[ImageSpan]]:
        """Replace each image token in `ids` by the ids of the next of `images`, which are (digest, grid). Return the
        ids and the spans of the images. Raise ValueError if the numbers of images and image tokens differ."""
        if (count := sum(i == self.image_token_id for i in ids)) != len(images):
            raise ValueError(f"the text has placeholders for {count} images, but there are {len(images)}")
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        rest = iter(images)
        for i in ids:
            if i == self.image_token_id:
                digest, grid = next(rest)
                shown = self.ids(grid)
                spans.append(ImageSpan(len(expanded), len(shown), digest, grid))
                expanded += shown
            else:
                expanded.append(i)
        return expanded, spans

    def collapse(self, ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Replace each image in `ids` by one image token: the inverse of `expand`."""
        collapsed: list[int] = []
        place = 0
        for span in spans:
            collapsed += ids[place : span.offset]
            collapsed.append(self.image_token_id)
            place = span.offset + span.length
        return [*collapsed, *ids[place:]]


def shifted(spans: Sequence[ImageSpan], by: int) -> list[ImageSpan]:
    """Return the spans shifted by `by` tokens."""
    return [replace(span, offset=span.offset + by) for span in spans]
