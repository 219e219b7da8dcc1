"""The vision tower's features of images, as inputs of the language model, in trainer and embedded engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import ModelOutput

from agentfactory.rollout.images.image_tokens import OwnProcessor, Vision

Inputs = Mapping[str, Tensor]
"""The network's arguments for images: pixels and their description."""

_AS_ONE = frozenset({"internvl", "idefics3", "smolvlm"})
"""Values of model_type whose networks take the features of all tiles as one tensor; others take a list of tensors."""


class Features(NamedTuple):
    """The vision tower's output for an image: a vector per image token, and further vectors that are added after the
    first decoder layers (Qwen3-VL's DeepStack, arXiv:2511.21631)."""

    tokens: Float[Tensor, "tokens width"]
    deep: tuple[Float[Tensor, "tokens width"], ...] = ()


class PixelMaker:
    """A converter of stored images to a network's inputs."""

    def __init__(self, path: str, vision: Vision) -> None:
        self._vision = vision
        # the Pillow backend needs no torchvision; it does not resize here
        own = isinstance(vision, OwnProcessor)
        options = {"backend": "pil", "do_resize": False, "trust_remote_code": False}
        self._resized = None if own else AutoImageProcessor.from_pretrained(path, **options)

    def make(self, image: Image.Image) -> Inputs:
        """Return the network's arguments for an image that `Vision.fit` returned."""
        if self._resized is None:
            assert isinstance(self._vision, OwnProcessor)
            return self._vision.process(image)[1]
        # do not resize: the model's own limits may differ from the recipe's (model.max_image_pixels)
        return {**self._resized(images=[image], do_resize=False, return_tensors="pt")}


def join(images: Sequence[Inputs]) -> dict[str, Tensor]:
    """Join the arguments of several images for one call: concatenate each tensor along the first dimension, padded with
    zeros where other sizes differ, as the processors of transformers do."""
    # Idefics3 has the tiles of an image in a second dimension
    nested = images[0]["pixel_values"].ndim == 5
    joined = {}
    for name in images[0]:
        parts = [image[name][0] if nested else image[name] for image in images]
        most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        whole = torch.cat([_padded(part, most) for part in parts])
        joined[name] = whole[None] if nested else whole
    return joined


def _padded(part: Tensor, sizes: list[int]) -> Tensor:
    missing = [most - size for size, most in zip(part.shape[1:], sizes, strict=True)]
    if not any(missing):
        return part
    return nn.functional.pad(part, [n for each in reversed(missing) for n in (0, each)])


def compute_features(network: Any, inputs: Inputs, counts: Sequence[int]) -> list[Features]:
    """Run the vision tower of a network on images, whose numbers of image tokens are `counts`."""
    found = network.base_model.get_image_features(**inputs, return_dict=True)
    whole = found.pooler_output
    if not isinstance(whole, Tensor) and len(whole) != len(counts):
        # transformers 5.24 puts the images of Idefics3 and SmolVLM together
        whole = torch.cat([*whole])
    # tiles are along the first dimension
    each = whole.flatten(0, -2).split(list(counts)) if isinstance(whole, Tensor) else whole
    deep = getattr(found, "deepstack_features", None) or []
    return [Features(tokens, tuple(more)) for tokens, *more in zip(each, *deep, strict=True)]


def encoder_outputs(network: Any, features: Sequence[Features]) -> dict[str, Any]:
    """Return the network's argument `mm_encoder_outputs` for images in the order of their tokens in the input."""
    deep = [list(each) for each in zip(*(image.deep for image in features), strict=True)]
    tokens = [image.tokens for image in features]
    # as tiles of one token, since tiles of different images may differ in size
    whole = torch.cat(tokens)[:, None] if network.config.model_type in _AS_ONE else tokens
    return {"mm_encoder_outputs": {"image": _Outputs(whole, deep)}}


@dataclass
class _Outputs(ModelOutput):
    pooler_output: list[Tensor] | Tensor | None = None
    deepstack_features: list[list[Tensor]] | None = None
