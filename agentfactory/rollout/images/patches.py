"""Models whose images are cut into patches on a grid of any size, with positions in time, height and width: Qwen's
(arXiv:2409.12191, section 2.1) and GLM's (arXiv:2507.01006)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.rollout.images.vision import Grid, Vision
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.errors import SettingError
from agentfactory.tools.images.sizes import SizeRule


@dataclass(frozen=True)
class PatchVision(Vision):
    """An image takes as many image tokens as its patches have blocks of `merge_size` x `merge_size`."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int = 1
    """How often the processor counts a pixel in its limits. GLM's counts it for each frame of a video's patch, which a
    still image fills."""
    grows: bool = False
    """Whether an image with a side below that of a token is enlarged, instead of that side alone: GLM's."""

    @property
    def sizes(self) -> SizeRule:
        """How images are resized."""
        return SizeRule(self.patch_size * self.merge_size, self.min_pixels, self.max_pixels, self.grows)

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize an RGB image as the model's own processor does, which then leaves it as it is. Raises ValueError if it
        is too narrow."""
        return self.sizes.fit(image)

    def check(self, width: int, height: int) -> None:
        """See Vision."""
        self.fitted(width, height)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) in which the model gets an image; see SizeRule."""
        return self.sizes.fitted(width, height)

    def grid(self, image: Image.Image) -> Grid:
        """Return the patches of an image that `fit` returned."""
        return 1, image.height // self.patch_size, image.width // self.patch_size

    def ids(self, grid: Grid) -> Sequence[int]:
        """See Vision: image tokens alone. What is around an image is in the chat template."""
        return [self.image_token_id] * (math.prod(grid) // self.merge_size**2)

    def server_options(self) -> dict[str, Any]:
        """See Vision."""
        if self.frames == 1:
            return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {"size": {"shortest_edge": self.frames * self.min_pixels, "longest_edge": self.frames * self.max_pixels}}

    def smallest(self) -> Grid:
        """See Vision: an image of one token, whatever the limits are."""
        return 1, self.merge_size, self.merge_size

    def blank(self, grid: Grid) -> Image.Image:
        """See Vision."""
        return Image.new("RGB", (grid[2] * self.patch_size, grid[1] * self.patch_size))

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


def patch_vision(
    config: dict[str, Any],
    processor: dict[str, Any],
    banned: tuple[int, ...],
    min_pixels: int | None,
    max_pixels: int | None,
) -> PatchVision:
    """Return how a model sees from its configuration and its processor's; `min_pixels` and `max_pixels` replace the
    processor's limits. Raises SettingError if the limits cannot be kept."""
    # the newer name of either limit is an area, too
    size = processor.get("size") or {}
    is_glm = config["model_type"].startswith("glm")
    frames = processor.get("temporal_patch_size", 2) if is_glm else 1
    least = min_pixels or (processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56) // frames
    most = max_pixels or (processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280) // frames
    if least > most:
        raise SettingError("model.max_image_pixels", f"got {most}, less than the {least} of the smallest", "raise it")
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
