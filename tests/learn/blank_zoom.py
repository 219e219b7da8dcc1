"""A zoom that shows nothing, to see what is answered without it."""

from typing import Any

from PIL import Image

from agentfactory.tools.tool import tool
from agentfactory.tools.user_code import load_object
from tests.conftest import REPOSITORY

Zoom = load_object("zoom.py:Zoom", REPOSITORY / "recipes" / "zoom")


class BlankZoom(Zoom):
    """Shows what `Zoom` shows as one grey."""

    @tool
    def zoom(self, bbox_2d: list[float], img_idx: int = 0) -> Any:
        """Look at a part of an image from near.

        Args:
            bbox_2d: The part as [left, top, right, bottom], each from 0 to 1000.
            img_idx: Number of the image among those of the task, from 0.
        """
        return Image.new("RGB", super().zoom(bbox_2d, img_idx).size, "grey")
