"""Image tokens: how a model's images are resized, expanded from placeholders to tokens, and numbered by positions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.model_hub import load_fault
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.coordinates import SizeRule

Grid = tuple[int, int, int]
"""Size of an image in time (1), height and width: in patches, or in pixels for models with an OwnProcessor."""
BANNED_BIAS = -100.0
"""Bias that servers and trainer add to the logits of `Vision.banned_token_ids`."""


@dataclass(frozen=True)
class Vision(ABC):
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
        """Resize an RGB image for storage and the model's processor. Raise ValueError for an unsupported size."""

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
        """Return the rotary positions of a row's tokens in time, height and width; None if one-dimensional."""

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


@dataclass(frozen=True)
class PatchVision(Vision):
    """Image processing of a patch family: each block of `merge_size` x `merge_size` patches is one image token."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int = 1
    """Factor by which the processor counts pixels in its limits: GLM's counts each once per frame of a video patch."""
    grows: bool = False
    """True if an image with a side shorter than a token's is enlarged as a whole, as in GLM, not only that side."""

    @property
    def sizes(self) -> SizeRule:
        return SizeRule(self.patch_size * self.merge_size, self.min_pixels, self.max_pixels, self.grows)

    def fit(self, image: Image.Image) -> Image.Image:
        # as the model's own processor does, which then leaves it unchanged
        return self.sizes.fit(image)

    def check(self, width: int, height: int) -> None:
        self.sizes.fitted(width, height)

    def grid(self, image: Image.Image) -> Grid:
        return 1, image.height // self.patch_size, image.width // self.patch_size

    def ids(self, grid: Grid) -> Sequence[int]:
        # the chat template writes the tokens around an image
        return [self.image_token_id] * (math.prod(grid) // self.merge_size**2)

    def server_options(self) -> dict[str, Any]:
        if self.frames == 1:
            return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {"size": {"shortest_edge": self.frames * self.min_pixels, "longest_edge": self.frames * self.max_pixels}}

    def smallest(self) -> Grid:
        return 1, self.merge_size, self.merge_size

    def blank(self, grid: Grid) -> Image.Image:
        return Image.new("RGB", (grid[2] * self.patch_size, grid[1] * self.patch_size))

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> Int[np.ndarray, "3 length"]:
        """A text token has the same position in all three; after an image, text continues at the largest plus one."""
        positions = np.empty((3, length), dtype=np.int64)
        place = start = 0
        for span in spans:
            text = span.offset - place
            positions[:, place : span.offset] = np.arange(start, start + text)
            start += text
            rows, columns = span.grid[1] // self.merge_size, span.grid[2] // self.merge_size
            place = span.offset + span.length
            # a row that was truncated within an image has only a part of it
            within = np.indices((span.grid[0], rows, columns)).reshape(3, -1)
            positions[:, span.offset : place] = (start + within)[:, : max(0, length - span.offset)]
            start += max(rows, columns)
        positions[:, place:] = np.arange(start, start + max(0, length - place))
        return positions


def patch_vision(
    config: dict[str, Any],
    processor: dict[str, Any],
    banned: tuple[int, ...],
    min_pixels: int | None,
    max_pixels: int | None,
) -> PatchVision:
    """Create the image processing of a model from its configuration and its processor's; `min_pixels` and `max_pixels`
    replace the processor's limits. Raise SettingError if the limits contradict each other."""
    # the newer names of the limits are areas, too
    size = processor.get("size") or {}
    is_glm = config["model_type"].startswith("glm")
    frames = processor.get("temporal_patch_size", 2) if is_glm else 1
    least = min_pixels or (processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56) // frames
    most = max_pixels or (processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280) // frames
    if least > most:
        raise SettingError("model.max_image_pixels", f"got {most}, less than the minimum of {least}", "raise it")
    return PatchVision(
        image_token_id=banned[0],
        banned_token_ids=banned,
        patch_size=processor.get("patch_size", config["vision_config"].get("patch_size", 14)),
        merge_size=processor.get("merge_size", config["vision_config"].get("spatial_merge_size", 2)),
        min_pixels=least,
        max_pixels=most,
        frames=frames,
        grows=is_glm,
    )


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
    """Image processing by a model's own processor. An image's tokens depend only on its size."""

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
        self.ids((1, height, width))

    def grid(self, image: Image.Image) -> Grid:
        return 1, image.height, image.width

    def ids(self, grid: Grid) -> Sequence[int]:
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
        of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        return ids, {name: value for name, value in made.items() if name not in of_text}

    def smallest(self) -> Grid:
        return 1, _SMALL, _SMALL

    def blank(self, grid: Grid) -> Image.Image:
        return Image.new("RGB", (grid[2], grid[1]))

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray | None:
        return None
