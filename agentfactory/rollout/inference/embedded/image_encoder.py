"""Image features of the vision tower for the language model, computed once per image and weight version."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.features import Features, PixelMaker, compute_features, encoder_outputs, join
from agentfactory.rollout.images.image_tokens import PatchVision
from agentfactory.rollout.images.store import digest_of
from agentfactory.rollout.inference.embedded.sampling import HeldImage, PromptImages, Request
from agentfactory.tools.images.decode import decode
from agentfactory.tools.images.lru_cache import ByteCache

IMAGE_BYTES = 2**30
"""Maximum size of the pixels held for requests that name an image by its uuid."""


class ImageCache:
    def __init__(self, vision: PatchVision, limit: int = IMAGE_BYTES) -> None:
        self.vision = vision
        self._held: ByteCache[str, HeldImage] = ByteCache(limit)
        self._next_id = -1

    async def receive(self, parts: Any) -> list[HeldImage]:
        """Return the images of a request's `content_parts`: {"type": "image_url", "url": "data:...", "uuid": UUID}. The
        url may be null for a held image; without a uuid, the key is the digest of the pixels. Raises ValueError, with
        vLLM's message for an image that is not held."""
        if not isinstance(parts, list):
            raise ValueError(f"content_parts: must be a list, not {type(parts).__name__}")
        return [await self._receive(index, part) for index, part in enumerate(parts)]

    async def _receive(self, index: int, part: Any) -> HeldImage:
        name = f"content_parts[{index}]"
        if not isinstance(part, dict) or part.get("type") != "image_url":
            raise ValueError(f'{name}: only {{"type": "image_url", "url": "data:...", "uuid": ...}} is supported')
        url, uuid = part.get("url"), part.get("uuid")
        if uuid is not None and not (isinstance(uuid, str) and uuid):
            raise ValueError(f"{name}.uuid: {uuid!r} is not a non-empty string")
        if uuid and (held := self._held.get(uuid)):
            return held
        if url is None:
            raise ValueError(f"Cache miss for image at index {index} but data is not provided.")
        if not isinstance(url, str) or not url.startswith("data:"):
            raise ValueError(f"{name}.url: must be a data: URL with the image's bytes, or null for a known uuid")
        try:
            image = await asyncio.to_thread(lambda: self.vision.fit(decode(url)))
        except ValueError as error:
            raise ValueError(f"{name}.url: {error}") from error
        return self.hold(image, uuid)

    def hold(self, image: Image.Image, uuid: str | None = None) -> HeldImage:
        """Store an image that `Vision.fit` has resized, unless it is already held."""
        uuid = uuid or digest_of(image)
        if held := self._held.get(uuid):  # another request has sent it meanwhile
            return held
        grid = self.vision.grid(image)
        held = HeldImage(uuid, image, grid, self.vision.tokens(grid), self._next_id)
        self._next_id -= held.tokens
        self._held.put(uuid, held, 3 * image.width * image.height)
        return held

    def place(self, ids: Sequence[int], held: Sequence[HeldImage]) -> tuple[np.ndarray, PromptImages | None]:
        """Replace each image token in `ids` by the ids of the next image's tokens. Raises ValueError if the numbers of
        images and image tokens differ."""
        expanded, spans = self.vision.expand(ids, [(image.uuid, image.grid) for image in held])
        prompt = np.asarray(expanded)
        for image, span in zip(held, spans, strict=True):
            prompt[span.offset : span.offset + span.length] = image.first_id - np.arange(span.length)
        if not held:
            return prompt, None
        rotary = self.vision.positions(len(prompt), spans)
        return prompt, PromptImages(held, spans, rotary, self.vision.image_token_id)


FEATURE_BYTES = 2**28
"""Maximum size of the stored features. Images whose tokens are in the KV cache no longer need theirs."""


class ImageEncoder:
    """The vision tower of `model`, with a cache of recent features."""

    def __init__(self, model: PreTrainedModel, vision: PatchVision, maker: PixelMaker) -> None:
        self.images = ImageCache(vision)
        """The images of requests."""
        self._model, self._maker, self._device = model, maker, model.device
        self._image_token_id = vision.image_token_id
        self._features: ByteCache[int, Features] = ByteCache(FEATURE_BYTES)

    def clear(self) -> None:
        """Drop all features, because the tower's weights change or the memory is needed."""
        self._features.clear()

    def pixels(self, images: Sequence[HeldImage]) -> dict[str, Tensor]:
        """Return the model's arguments `pixel_values` and `image_grid_thw` for images."""
        made = join([self._maker.make(image.image) for image in images])
        return {name: value.to(self._device) for name, value in made.items()}

    def prepare(
        self, requests: Sequence[Request], ids: np.ndarray, rotary: np.ndarray, start: np.ndarray, after: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Return a step's token ids [tokens], its rotary positions ([3, tokens] if it includes prompts with images,
        else [tokens]), and the model's further arguments. `ids` are the cache's, and `rotary` the positions of tokens
        after a prompt. A request's new tokens begin at `start` of its sequence, and end at `after` of the step."""
        parts: list[tuple[HeldImage, slice, slice]] = []
        begin = after - np.diff(after, prepend=0)
        for request, first, here, end in zip(requests, start.tolist(), begin.tolist(), after.tolist(), strict=True):
            last = min(first + end - here, len(request.prompt))
            if not request.images or last <= first:
                continue
            if rotary.ndim == 1:
                rotary = np.repeat(rotary[None], 3, 0)
            rotary[:, here : here + last - first] = request.images.rotary[:, first:last]
            for image, span in zip(request.images.held, request.images.spans, strict=True):
                low, high = max(first, span.offset), min(last, span.offset + span.length)
                if low < high:
                    place = slice(here + low - first, here + high - first)
                    parts.append((image, place, slice(low - span.offset, high - span.offset)))
        ids = np.where(ids < 0, self._image_token_id, ids)
        return ids, rotary, self._arguments(ids, parts) if parts else {}

    def _arguments(self, ids: np.ndarray, parts: Sequence[tuple[HeldImage, slice, slice]]) -> dict[str, Any]:
        """Return the arguments with the features of the step's image tokens. `parts` contains images, the positions of
        their tokens in the step, and the range of each image's tokens at these positions."""
        features = self._compute({image for image, *_ in parts})
        places = ids == self._image_token_id
        order = places.cumsum() - 1
        # a sampled image token stands for no image, and keeps its own embedding
        embedding = self._model.get_input_embeddings()
        own: Tensor = embedding(torch.tensor(self._image_token_id, device=self._device))
        own = own.expand(int(places.sum()), -1)
        step = Features(own.clone(), tuple(torch.zeros_like(own) for _ in next(iter(features.values())).deep))
        for image, place, within in parts:
            rows = slice(int(order[place.start]), int(order[place.stop - 1]) + 1)
            step.tokens[rows] = features[image].tokens[within]
            for deep, new in zip(step.deep, features[image].deep, strict=True):
                deep[rows] = new[within]
        return encoder_outputs(self._model, [step])

    def _compute(self, images: set[HeldImage]) -> dict[HeldImage, Features]:
        found = {image: features for image in images if (features := self._features.get(image.first_id)) is not None}
        if missing := [*(images - found.keys())]:
            computed = compute_features(self._model, self.pixels(missing), [image.tokens for image in missing])
            for image, features in zip(missing, computed, strict=True):
                found[image] = features
                nbytes = sum(tensor.nbytes for tensor in (features.tokens, *features.deep))
                self._features.put(image.first_id, features, nbytes)
        return found


def load_encoder(path: str, model: PreTrainedModel) -> ImageEncoder:
    """Return the encoder of the vision-language model at `path`. Raises ValueError if its images are not supported."""
    vision = load_vision(path)
    if not isinstance(vision, PatchVision):
        raise ValueError(f"the embedded engine does not support images of {model.config.model_type}: use engine: vllm")
    return ImageEncoder(model, vision, PixelMaker(path, vision))
