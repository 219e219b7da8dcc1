"""The images of requests: pixels held by uuid, and positions in prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image

from agentfactory.rollout.images.image_tokens import Grid, PatchVision
from agentfactory.rollout.images.store import digest_of
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.decode import decode
from agentfactory.tools.images.lru_cache import ByteCache

IMAGE_BYTES = 2**30
"""Maximum size of the pixels held for requests that name an image by its uuid."""


@dataclass(frozen=True, eq=False, slots=True)
class HeldImage:
    """A received image. `first_id` and the ids below it stand for its tokens in the engine's cache. They are negative
    and unique to the image, so prompts with equal token ids but different images share no cache."""

    uuid: str
    image: Image.Image
    grid: Grid
    tokens: int
    first_id: int


class PromptImages(NamedTuple):
    """The images of a prompt and their positions. `rotary` contains the rotary positions in time, height and width; for
    a token after the prompt, all three are its index plus `shift`."""

    held: Sequence[HeldImage]
    spans: Sequence[ImageSpan]
    rotary: Int[np.ndarray, "3 prompt"]
    image_token_id: int

    @property
    def shift(self) -> int:
        return int(self.rotary.max()) + 1 - self.rotary.shape[1]

    def token_ids(self, ids: np.ndarray) -> np.ndarray:
        """Convert the ids of the engine's cache to the model's token ids."""
        return np.where(ids < 0, self.image_token_id, ids)


class ImageCache:
    """A cache of received images, by uuid."""

    def __init__(self, vision: PatchVision, limit: int = IMAGE_BYTES) -> None:
        self.vision = vision
        self._held: ByteCache[str, HeldImage] = ByteCache(limit)
        self._next_id = -1

    async def receive(self, parts: Any) -> list[HeldImage]:
        """Return the images of a request's `content_parts`: {"type": "image_url", "url": "data:...", "uuid": UUID}. The
        url may be null for a held image, which is used unchanged. Without a uuid the key is the digest of its pixels.

        Images are decoded in another thread. Raises ValueError; for an image without url that is not held, with
        vLLM's message.
        """
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
            image = await asyncio.to_thread(self._decode, url)
        except ValueError as error:
            raise ValueError(f"{name}.url: {error}") from error
        return self.hold(image, uuid)

    def _decode(self, url: str) -> Image.Image:
        return self.vision.fit(decode(url))

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
