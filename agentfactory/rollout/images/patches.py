"""Model families that cut images into patches on a grid of any size, with positions in time, height and width: Qwen
(arXiv:2409.12191, section 2.1) and GLM (arXiv:2507.01006)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.vision import Grid, Vision
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.coordinates import SizeRule


@dataclass(frozen=True)
class PatchVision(Vision):
    """Image processing of a patch family: each block of `merge_size` x `merge_size` patches is one image token."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int = 1
    """Factor by which the processor counts pixels in its limits. GLM's counts each pixel once per frame of a video
    patch, all of which a still image fills."""
    grows: bool = False
    """True if an image with a side shorter than a token's is enlarged as a whole, as in GLM, instead of only that side.
    """

    @property
    def sizes(self) -> SizeRule:
        """The rule by which images are resized."""
        return SizeRule(self.patch_size * self.merge_size, self.min_pixels, self.max_pixels, self.grows)

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image as the model's own processor does, which then leaves it unchanged. Raise ValueError if it
        is too narrow."""
        return self.sizes.fit(image)

    def check(self, width: int, height: int) -> None:
        """See Vision."""
        self.fitted(width, height)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) of an image after resizing; see SizeRule."""
        return self.sizes.fitted(width, height)

    def grid(self, image: Image.Image) -> Grid:
        """Return the grid of an image that `fit` returned, in patches."""
        return 1, image.height // self.patch_size, image.width // self.patch_size

    def ids(self, grid: Grid) -> Sequence[int]:
        """See Vision. Return only image tokens: the chat template writes the tokens around an image."""
        return [self.image_token_id] * (math.prod(grid) // self.merge_size**2)

    def server_options(self) -> dict[str, Any]:
        """See Vision."""
        if self.frames == 1:
            return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {"size": {"shortest_edge": self.frames * self.min_pixels, "longest_edge": self.frames * self.max_pixels}}

    def smallest(self) -> Grid:
        """See Vision. Return the grid of an image with one token, regardless of the limits."""
        return 1, self.merge_size, self.merge_size

    def blank(self, grid: Grid) -> Image.Image:
        """See Vision."""
        return Image.new("RGB", (grid[2] * self.patch_size, grid[1] * self.patch_size))

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> Int[np.ndarray, "3 length"]:
        """Return the rotary positions in time, height and width of a row's tokens. A text token has the same position
        in all three; text after an image continues at the largest position plus one."""
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
