"""The images of a request to an inference server: sent once to each server, and checked against what it made of
them."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfactory.rollout.images.image_intake import ShownImages
from agentfactory.rollout.images.parts import data_url
from agentfactory.rollout.token_row import ImageSpan

_REMEMBERED = 16_384
"""Images per server that are known to have been sent."""


@dataclass(frozen=True)
class RequestImages:
    """The images in a request's ids, which have as many tokens for each as it takes."""

    ids: Sequence[int]
    spans: Sequence[ImageSpan]
    shown: ShownImages

    def collapsed(self) -> list[int]:
        """Return the ids with one token for each image, as the server takes them."""
        return self.shown.vision.collapse(self.ids, self.spans)

    async def parts(self, sent: "SentImages") -> list[dict[str, Any]]:
        """Return the request's `content_parts`: the server that `sent` describes gets the bytes of new images, and of
        others only the name."""
        digests = [span.digest for span in self.spans]
        new = [digest for digest in dict.fromkeys(digests) if digest not in sent]
        read = await asyncio.to_thread(self._data, new) if new else {}
        return [{"type": "image_url", "url": read.get(digest), "uuid": digest} for digest in digests]

    def _data(self, digests: Sequence[str]) -> dict[str, str]:
        return {digest: data_url(self.shown.store.png(digest)) for digest in digests}

    def fault(self, prompt_ids: Any) -> str | None:
        """Return what is wrong with the ids in which the server says that it saw the request; None if nothing is."""
        if prompt_ids == list(self.ids):
            return None
        told = f"{len(prompt_ids)} others" if isinstance(prompt_ids, list) else "none"
        return (
            f"the request has {len(self.ids)} tokens with {len(self.spans)} images, and the server read {told}: it "
            "resizes images otherwise, or reads tokens as images that are none"
        )


class SentImages:
    """The digests of images that a server has got, as far as is remembered; it may have forgotten them itself."""

    def __init__(self) -> None:
        self._digests: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def note(self, spans: Sequence[ImageSpan]) -> None:
        """Note that the server has these images."""
        for span in spans:
            self._digests[span.digest] = None
            self._digests.move_to_end(span.digest)
        while len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)

    def forget(self, spans: Sequence[ImageSpan]) -> None:
        """Note that the server lacks these images."""
        for span in spans:
            self._digests.pop(span.digest, None)
