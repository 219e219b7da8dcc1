"""How a model sees: the image that it gets, the tokens that stand for it, and their positions.

Two ways lead to the tokens of an image. Families of `patches` have one rule for sizes, and images are resized once,
here. All others are left to the model's own processor (own_processor), which the server runs, too.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image
from transformers.utils.hub import cached_file

from agentfactory.rollout.trajectory import ImageSpan
from agentfactory.tools.errors import SettingError
from agentfactory.tools.import_path import is_installed

Grid = tuple[int, int, int]
"""Size of an image in time (1), height and width: in patches, or in pixels for models of `own_processor`."""

BY_PATCHES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"}
)
"""Values of model_type whose images are resized and placed as in Qwen2-VL (arXiv:2409.12191, section 2.1)."""
BY_OWN_PROCESSOR = frozenset({"internvl", "mistral3", "idefics3", "smolvlm"})
"""Values of model_type whose images are left to their own processor. The positions of their tokens are one-dimensional,
and images change nothing in the attention."""
BANNED_BIAS = -100.0
"""Added to the logits of `Vision.banned_token_ids`, by servers and trainer alike."""


def is_seen(model_type: str) -> bool:
    """Return whether images of models of this kind are supported here. Processors of transformers that resize as
    servers do need torchvision."""
    return model_type in BY_PATCHES or (model_type in BY_OWN_PROCESSOR and is_installed("torchvision"))


UNSEEN = {
    "gemma3": "the tokens of an image see each other in both directions, and rows here attend causally",
    "gemma4": "it has sizes in which the tokens of an image see each other in both directions, and rows here attend "
    "causally",
}
"""Values of model_type whose images are not supported, with the reason."""


def why_unseen(path: str) -> str:
    """Return why the images of the model at `path` are not supported."""
    config = _read(path, "config.json")
    kind = config.get("model_type")
    if "vision_config" not in config:
        return f"{path} reads only text"
    if kind in BY_OWN_PROCESSOR:
        return f"{path} ({kind}) needs torchvision for its images, which is not installed"
    if kind in UNSEEN:
        return f"{path} ({kind}): {UNSEEN[kind]}"
    return f"{path} sees as {kind} does, which is not supported"


@dataclass(frozen=True)
class Vision(ABC):
    """The images of one model."""

    image_token_id: int
    """The token that the chat template writes for an image, and that each of its features replaces."""
    banned_token_ids: tuple[int, ...]
    """Tokens that stand for images and videos: a sampled one would be an image that is not there."""

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


def load_vision(path: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Vision | None:
    """Return how the model at `path`, a folder or hub name, sees; None if it reads only text, or sees in a way that is
    not supported (see why_unseen): its chains are of text, then.

    `min_pixels` and `max_pixels` are the recipe's limits. Raises SettingError if the model has no processor, or the
    limits cannot be kept.
    """
    config = _read(path, "config.json")
    kind = config.get("model_type", "")
    if "vision_config" not in config or not is_seen(kind):
        return None
    processor = _read(path, "preprocessor_config.json") or _read(path, "processor_config.json").get("image_processor")
    if not processor:
        problem = f"{path} has no preprocessor_config.json, which says how images are resized"
        raise SettingError("model.path", problem, "add the file of the original model")
    banned = banned_token_ids(config)
    if kind in BY_PATCHES:
        from agentfactory.rollout.images.patches import patch_vision

        return patch_vision(config, processor, banned, min_pixels, max_pixels)
    # transformers' processors load torch
    from agentfactory.rollout.images.own_processor import OwnProcessor, load_own_processor

    return OwnProcessor(banned[0], banned, load_own_processor(path), min_pixels, max_pixels)


def banned_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that stand for images and videos, those of images first, from a model's configuration."""
    image = config.get("image_token_id", config.get("image_token_index"))
    return tuple(i for i in (image, config.get("video_token_id")) if i is not None)


def copy_processor(path: str, folder: Path) -> None:
    """Copy the files that say how the model at `path` gets images and videos, if it has them."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(file, folder / name)


def _read(path: str, name: str) -> dict[str, Any]:
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
