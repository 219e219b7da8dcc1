"""What the network's vision tower makes of images, and how the language model gets it; for the trainer and the embedded
engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor


class Features(NamedTuple):
    """The vision tower's output for one image: a vector per token, and further ones that are added after the first
    decoder layers (Qwen3-VL's DeepStack, arXiv:2511.21631)."""

    tokens: Float[Tensor, "tokens width"]
    deep: tuple[Float[Tensor, "tokens width"], ...] = ()


def load_processor(path: str) -> Any:
    """Return the image processor of a model: Pillow's kind, which needs no torchvision. It does not resize."""
    return AutoImageProcessor.from_pretrained(path, backend="pil", do_resize=False)


def pixels_of(
    processor: Any, images: Sequence[Image.Image]
) -> tuple[Float[Tensor, "patches values"], Int[Tensor, "images 3"]]:
    """Return the patches of images that were resized by `Vision.fit`, and their numbers in time, height and width."""
    # the model's own limits may be others than the recipe's (model.max_image_pixels)
    found = processor(images=list(images), do_resize=False, return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


def compute_features(
    network: Any, pixels: Float[Tensor, "patches values"], grids: Int[Tensor, "images 3"]
) -> list[Features]:
    """Run the vision tower of a network (with or without its head) on images."""
    found = network.base_model.get_image_features(pixels, grids, return_dict=True)
    deep = getattr(found, "deepstack_features", None) or []
    return [Features(tokens, tuple(each)) for tokens, *each in zip(found.pooler_output, *deep, strict=True)]


def encoder_outputs(features: Sequence[Features]) -> dict[str, Any]:
    """Return the network's argument `mm_encoder_outputs` for images in the order of their tokens in the input."""
    deep = [list(each) for each in zip(*(image.deep for image in features), strict=True)]
    output = _Outputs([image.tokens for image in features], deep)
    return {"mm_encoder_outputs": {"image": output}}


class _Outputs(NamedTuple):
    pooler_output: list[Tensor]
    deepstack_features: list[list[Tensor]]
