"""Bodies of the gateway's requests, from programs that may be hostile: within limits of size, number, time and memory,
which all chains of a rollout worker share."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentfactory.rollout.chains.opening_prompt import MOST_CHARACTERS
from agentfactory.rollout.gateway.request_options import Refusal, wrong
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.text.parsers.values import MAX_DEPTH, check_depth, finite, no_constant

BODY_SECONDS = 120.0
"""Time limit for receiving a body."""
TOGETHER_BYTES = 1 << 28
"""Maximum size of the bodies of all chains that are received, parsed and rendered at a time; others wait."""
_OTHER_BYTES = 1 << 20
"""Maximum size of a request besides its conversation."""
_IMAGE_BYTES = 1 << 26
"""Maximum size of all images of a request; OpenAI takes 50 MB."""
_FREE_BYTES = 1 << 16
"""Size up to which a body does not wait for others."""
MOST_BODIES = 4
"""Maximum number of bodies of a chain received concurrently; others wait."""
_MOST_VALUES = 1 << 20
_BETWEEN_VALUES = (b",", b"[", b"{")
"""Bytes that a request may contain at most _MOST_VALUES times. Each starts a JSON value, which takes much more memory
than its text; an image is a single value."""


def most_bytes(longest: int, images: Images) -> int:
    """Return the maximum size of a request's body for conversations of at most `longest` tokens."""
    return _OTHER_BYTES + MOST_CHARACTERS * longest + (0 if images.vision is None else _IMAGE_BYTES)


class RequestBodies:
    """A receiver of the bodies of all chains' requests."""

    def __init__(self) -> None:
        self._free = TOGETHER_BYTES
        self._first = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def receiving(
        self, request: web.Request, places: asyncio.Semaphore, most: int, overflow: Callable[[str], Refusal]
    ) -> AsyncIterator[dict[str, Any]]:
        """Provide the JSON object of a request, of at most `most` bytes; a longer one is refused by `overflow`. Until
        the context ends, it takes one of the chain's `places`, and its bytes count against the common limit."""
        size = min(request.content_length or most, most, TOGETHER_BYTES)
        async with places, self._taking(size if size > _FREE_BYTES else 0):
            yield await _received(request, most, overflow)

    @asynccontextmanager
    async def _taking(self, size: int) -> AsyncIterator[None]:
        """Wait, first come, first served, until `size` bytes are free, and take them in this context."""
        if size:
            async with self._first:
                while self._free < size:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._freed.set()


async def _received(request: web.Request, most: int, overflow: Callable[[str], Refusal]) -> dict[str, Any]:
    if encoding := request.headers.get("Content-Encoding", "").replace("identity", ""):
        raise Refusal(415, "unsupported_media_type", f"Content-Encoding: got {encoding}; send the body unencoded")
    content = bytearray()  # request.read() would keep a copy as long as the request
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.content.iter_any():
                content += piece
                if len(content) > most:
                    raise overflow(f"a request may have {most:,} bytes, and this one has more")
    except TimeoutError:
        text = f"the request's body did not arrive within {BODY_SECONDS:g} s"
        raise Refusal(408, "request_timeout", text) from None
    except web.RequestPayloadError as error:
        raise wrong(f"the request's body cannot be read: {error}") from None
    if sum(map(content.count, _BETWEEN_VALUES)) > _MOST_VALUES:
        raise Refusal(413, "request_entity_too_large", f"the request has more than {_MOST_VALUES} JSON values")
    try:
        body = json.loads(content, parse_float=finite, parse_constant=no_constant)
        check_depth(body)
    except RecursionError:
        raise wrong(f"the request is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise wrong(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise wrong("the request is not a JSON object")
    return body
