"""How a model sees: the image that it gets, the tokens that stand for it, and their positions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.sizes import SizeRule

Grid = tuple[int, int, int]
"""Size of an image in time (1), height and width: in patches, or in pixels for models of `own_processor`."""
BANNED_BIAS = -100.0
"""Added to the logits of `Vision.banned_token_ids`, by servers and trainer alike."""


@dataclass(frozen=True)
class Vision(ABC):
    """The images of one model."""

    image_token_id: int
    """The token that the chat template writes for an image, and that each of its features replaces."""
    banned_token_ids: tuple[int, ...]
    """Tokens that stand for images and videos: a sampled one would be an image that is not there."""

    @property
    def sizes(self) -> SizeRule | None:
        """How images are resized; None if that is left to the model's own processor."""
        return None

    @abstractmethod
    def fit(self, image: Image.Image) -> Image.Image:
        """Return the image that is stored of an RGB image: the model's processor gets it, here and in the server.
        Raises ValueError if it cannot be shown."""

    @abstractmethod
    def check(self, width: int, height: int) -> None:
        """Raise ValueError if an image of this size cannot be shown."""

    @abstractmethod
    def grid(self, image: Image.Image) -> Grid:
        """Return the size of an image that `fit` returned."""

    @abstractmethod
    def ids(self, grid: Grid) -> Sequence[int]:
        """Return the ids that stand for an image: image tokens, and what the model has around and between them."""

    @abstractmethod
    def positions(self, length: int, spans: Sequence[ImageSpan]) -> Int[np.ndarray, "3 length"] | None:
        """Return the rotary positions in time, height and width of a row's tokens; None if tokens are just counted."""

    def server_options(self) -> dict[str, Any]:
        """Return vLLM's `mm_processor_kwargs` by which it leaves an image as it is stored, where the recipe has
        limits."""
        return {}

    @abstractmethod
    def smallest(self) -> Grid:
        """Return the size of an image with few tokens."""

    @abstractmethod
    def blank(self, grid: Grid) -> Image.Image:
        """Return a black image of this size."""

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens that stand for an image."""
        return len(self.ids(grid))

    def features(self, grid: Grid) -> int:
        """Return the number of an image's features: of its image tokens."""
        return sum(i == self.image_token_id for i in self.ids(grid))

    def expand(self, ids: Sequence[int], images: Sequence[tuple[str, Grid]]) -> tuple[list[int], list[ImageSpan]]:
        """Replace each image token in `ids` by the ids of the next one of `images`, (digest, grid). Returns the ids,
        and where the images are in them. Raises ValueError if there are more or fewer images than tokens."""
        if (count := sum(i == self.image_token_id for i in ids)) != len(images):
            raise ValueError(f"the text has places for {count} images, and there are {len(images)}")
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
        """Return `ids` with one token in the place of each image: the inverse of `expand`."""
        collapsed: list[int] = []
        place = 0
        for span in spans:
            collapsed += ids[place : span.offset]
            collapsed.append(self.image_token_id)
            place = span.offset + span.length
        return [*collapsed, *ids[place:]]


def shifted(spans: Sequence[ImageSpan], by: int) -> list[ImageSpan]:
    """Return the spans of a text that begins `by` tokens later."""
    return [replace(span, offset=span.offset + by) for span in spans]
