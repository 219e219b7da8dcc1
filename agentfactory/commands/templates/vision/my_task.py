"""The task: name the cloth in a corner of a picture, which is visible only in full size. Change the tool, the reward
and the pictures to make your own."""

from typing import Any, Literal

from PIL import Image

from agentfactory import Environment, reward, tool

CLOTHS = ("bands", "checks", "diagonals", "dots", "plain", "stripes")


class Pictures(Environment):
    """A task's pictures in full size; the model gets them reduced to `model.max_image_pixels`."""

    def reset(self, images: list[str], **task: Any) -> None:
        """Begin a task: `images` are the paths of its row's images."""
        self.pictures = [Image.open(path) for path in images]

    @tool
    def look(self, corner: Literal["top left", "top right", "bottom left", "bottom right"]) -> Image.Image:
        """Look at a corner of the picture from near.

        Args:
            corner: The corner to look at.
        """
        [picture] = self.pictures
        width, height = picture.width // 4, picture.height // 4
        top = 0 if corner.startswith("top") else picture.height - height
        left = 0 if corner.endswith("left") else picture.width - width
        return picture.crop((left, top, left + width, top + height))


@reward
def right_cloth(prediction: str | None, answer: str) -> dict[str, float]:
    """Return 1 if the last message names the cloth `answer`, a field of the task's row, and no other, else 0."""
    named = [cloth for cloth in CLOTHS if cloth in (prediction or "").lower()]
    right = float(named == [answer])
    return {"reward": right, "success": right}
