"""A zoom that shows nothing, to see what is answered without it."""

from typing import Any

from PIL import Image

from agentfactory.tools.tool import tool
from agentfactory.worlds.images.image_tools import Box, ImageTools


class BlankZoom(ImageTools):
    """Shows what `zoom` shows as one grey."""

    @tool
    def zoom(self, bbox_2d: Box, img_idx: int = 0) -> Any:
        """Look at a part of an image from near.

        Args:
            bbox_2d: The part as [left, top, right, bottom], {coordinates}.
            img_idx: Number of the image, from 0.
        """
        result = super().zoom(bbox_2d, img_idx)
        return {**result, "observation": Image.new("RGB", result["observation"].size, "grey")}
