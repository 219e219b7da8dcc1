"""Images in requests to inference servers: each is sent once per server, and the server's expansion is checked."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfactory.rollout.images.image_intake import ShownImages
from agentfactory.rollout.images.parts import data_url
from agentfactory.rollout.token_row import ImageSpan

_REMEMBERED = 16_384


@dataclass(frozen=True)
class RequestImages:
    """The images in a request's `ids`, in which images are expanded to their tokens."""

    ids: Sequence[int]
    spans: Sequence[ImageSpan]
    shown: ShownImages

    def collapsed(self) -> list[int]:
        """Return the ids with one token per image, as the server expects them."""
        return self.shown.vision.collapse(self.ids, self.spans)

    async def parts(self, sent: "SentImages") -> list[dict[str, Any]]:
        """Return the request's `content_parts`: the data of images that are not in `sent`, only digests of others."""
        digests = [span.digest for span in self.spans]
        new = [digest for digest in dict.fromkeys(digests) if digest not in sent]
        read = await asyncio.to_thread(self._data, new) if new else {}
        return [{"type": "image_url", "url": read.get(digest), "uuid": digest} for digest in digests]

    def _data(self, digests: Sequence[str]) -> dict[str, str]:
        return {digest: data_url(self.shown.store.png(digest)) for digest in digests}

    def fault(self, prompt_ids: Any) -> str | None:
        """Return the problem if the prompt ids that the server reports differ from the request's, else None."""
        if prompt_ids == list(self.ids):
            return None
        told = f"{len(prompt_ids)} other tokens" if isinstance(prompt_ids, list) else "none"
        return (
            f"the request has {len(self.ids)} tokens with {len(self.spans)} images, but the server reports {told}: it "
            "resizes images differently, or takes other tokens for images"
        )


class SentImages:
    """The digests of the last _REMEMBERED images sent to a server, which may have evicted them since."""

    def __init__(self) -> None:
        self._digests: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def note(self, spans: Sequence[ImageSpan]) -> None:
        """Record that the server has these images."""
        for span in spans:
            self._digests[span.digest] = None
            self._digests.move_to_end(span.digest)
        while len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)

    def forget(self, spans: Sequence[ImageSpan]) -> None:
        """Record that the server lacks these images."""
        for span in spans:
            self._digests.pop(span.digest, None)
