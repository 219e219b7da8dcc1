"""How a model sees: the size that it gets an image in, the tokens that stand for it, and their positions."""

import json
import math
import shutil
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

Grid = tuple[int, int, int]
"""Patches of an image in time (1), height and width."""

QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Values of model_type whose images are resized and placed as in Qwen2-VL (arXiv:2409.12191, section 2.1)."""
BANNED_BIAS = -100.0
"""Added to the logits of `Vision.banned_token_ids`, by servers and trainer alike."""
MOST_ASPECT = 200
"""Largest ratio of an image's sides."""


@dataclass(frozen=True)
class Vision:
    """The images of one model. An image takes as many tokens `image_token_id` as its patches have blocks of
    `merge_size` x `merge_size`."""

    image_token_id: int
    banned_token_ids: tuple[int, ...]
    """Tokens that stand for images and videos: a sampled one would be an image that is not there."""
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image as the model's own processor does, which then leaves it as it is. Raises ValueError if it
        is too narrow."""
        size = self.fitted(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) in which the model gets an image: multiples of the size of a token, an area from
        `min_pixels` to `max_pixels`, and nearly the same aspect. Raises ValueError if the aspect exceeds
        MOST_ASPECT."""
        size = self._fitted(width, height)
        # a narrow image may still be too large: the server would resize it again
        while (again := self._fitted(*size)) != size:
            size = again
        return size

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that transformers' processor gives an image (its `smart_resize`)."""
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise ValueError(
                f"the image has {width} x {height} pixels, and one side may be at most {MOST_ASPECT} times the other"
            )
        factor = self.patch_size * self.merge_size
        sides = [round(side / factor) * factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]

    def grid(self, image: Image.Image) -> Grid:
        """Return the patches of an image that `fit` returned."""
        return 1, image.height // self.patch_size, image.width // self.patch_size

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens that stand for an image."""
        return math.prod(grid) // self.merge_size**2

    def expand(self, ids: Sequence[int], images: Sequence[tuple[str, Grid]]) -> tuple[list[int], list[ImageSpan]]:
        """Replace each image token in `ids` by those of the next one of `images`, (digest, grid). Returns the ids, and
        where the images are in them. Raises ValueError if there are more or fewer images than tokens."""
        if (count := sum(i == self.image_token_id for i in ids)) != len(images):
            raise ValueError(f"the text has places for {count} images, and there are {len(images)}")
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        rest = iter(images)
        for i in ids:
            if i == self.image_token_id:
                digest, grid = next(rest)
                spans.append(ImageSpan(len(expanded), self.tokens(grid), digest, grid))
                expanded += [i] * self.tokens(grid)
            else:
                expanded.append(i)
        return expanded, spans

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> Int[np.ndarray, "3 length"]:
        """Return the rotary positions in time, height and width of a row's tokens. The token of a text has the same in
        all three; text after an image continues at the largest position plus one."""
        positions = np.empty((3, length), dtype=np.int64)
        place = start = 0
        for span in spans:
            text = span.offset - place
            positions[:, place : span.offset] = np.arange(start, start + text)
            start += text
            rows, columns = span.grid[1] // self.merge_size, span.grid[2] // self.merge_size
            place = span.offset + span.length
            # a row that was cut inside an image has only a part of it
            within = np.indices((span.grid[0], rows, columns)).reshape(3, -1)
            positions[:, span.offset : place] = (start + within)[:, : max(0, length - span.offset)]
            start += max(rows, columns)
        positions[:, place:] = np.arange(start, start + max(0, length - place))
        return positions


def collapse(ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
    """Return `ids` with one token in the place of each image: the inverse of `Vision.expand`."""
    collapsed: list[int] = []
    place = 0
    for span in spans:
        collapsed += ids[place : span.offset + 1]
        place = span.offset + span.length
    return [*collapsed, *ids[place:]]


def shifted(spans: Sequence[ImageSpan], by: int) -> list[ImageSpan]:
    """Return the spans of a text that begins `by` tokens later."""
    return [replace(span, offset=span.offset + by) for span in spans]


def load_vision(path: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Vision | None:
    """Return how the model at `path`, a folder or hub name, sees; None if it reads only text, or sees in a way that is
    not supported: its chains are of text, then.

    `min_pixels` and `max_pixels` replace those of the model's own processor. Raises SettingError if that is missing, or
    the limits cannot be kept.
    """
    config = _read(path, "config.json")
    if "vision_config" not in config or config.get("model_type") not in QWEN:
        return None
    processor = _read(path, "preprocessor_config.json")
    if not processor:
        problem = f"{path} has no preprocessor_config.json, which says how images are resized"
        raise SettingError("model.path", problem, "add the file of the original model")
    # the newer name of either limit is an area, too
    size = processor.get("size") or {}
    least = min_pixels or processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = max_pixels or processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    if least > most:
        raise SettingError("model.max_image_pixels", f"got {most}, less than the {least} of the smallest", "raise it")
    ids = [config.get(name) for name in ("image_token_id", "video_token_id")]
    return Vision(
        image_token_id=config["image_token_id"],
        banned_token_ids=tuple(i for i in ids if i is not None),
        patch_size=processor.get("patch_size", config["vision_config"].get("patch_size", 14)),
        merge_size=processor.get("merge_size", config["vision_config"].get("spatial_merge_size", 2)),
        min_pixels=least,
        max_pixels=most,
    )


def copy_processor(path: str, folder: Path) -> None:
    """Copy the files that say how the model at `path` gets images and videos, if it has them."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(file, folder / name)


def _read(path: str, name: str) -> dict[str, Any]:
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
