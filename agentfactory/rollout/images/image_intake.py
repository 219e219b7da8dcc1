"""Intake of a run's images: those of tasks and tools are resized for the model, stored, and sent once per server."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message, text_of
from agentfactory.rollout.images import parts
from agentfactory.rollout.images.image_tokens import Grid, Vision
from agentfactory.rollout.images.parts import data_url, image_part, image_urls, map_parts
from agentfactory.rollout.images.store import ImageStore, is_file, stored_digest, url_of
from agentfactory.rollout.token_row import ImageSpan, Row
from agentfactory.tools.images.decode import content_of, decode, size_of
from agentfactory.tools.images.lru_cache import ByteCache

_REMEMBERED = 4096
"""Number of images that are recognised without decoding them again, since the chains of a group share images."""
_CHECK_SECONDS = 10.0
"""Time limit for decoding images of all rows before the first chain; of the rest, only the headers are read."""


class ShownImages:
    """The image intake of a multimodal model in a run. `vision` has the model's image processing; `store` has the
    images. `shows` is true if the chat template renders images; otherwise they become text."""

    def __init__(self, vision: Vision, store: ImageStore) -> None:
        self.vision = vision
        self.store = store
        self.shows = True
        self.grid: Callable[[str], Grid] = lru_cache(_REMEMBERED)(self._grid)
        """Digest of a stored image -> its grid. Raises ValueError if it is not stored."""
        self._taken: ByteCache[tuple[bytes, bool], str] = ByteCache(_REMEMBERED)
        self._lock = Lock()

    # ---- intake

    async def take_task(self, task: dict[str, Any], source: str, row: int | None = None) -> dict[str, Any]:
        """Return a row whose `messages` refer to stored images. `images` become paths of files for tools and rewards.
        Raise SettingError with the field `source`, and the `row` if given, for an unusable image."""
        return await asyncio.to_thread(self._take_task, task, source, row)

    def take_tasks(self, tasks: Sequence[dict[str, Any]], source: str) -> list[dict[str, Any]]:
        """Take many rows, with or without images, as `take_task` does. Blocking."""
        return [
            self._take_task(task, source, number) if parts.images_of_row(task) else task
            for number, task in enumerate(tasks, 1)
        ]

    def check_tasks(self, tasks: Sequence[dict[str, Any]], most: int | None, source: str) -> None:
        """Check that each row has at most `most` images, and that all are usable: decode images for _CHECK_SECONDS, and
        read only the headers of the rest. Blocking. Raise SettingError with the row's number."""
        until = time.monotonic() + _CHECK_SECONDS
        for number, task in enumerate(tasks, 1):
            images = parts.images_of_row(task)
            if most is not None and len(images) > most:
                problem = f"row {number} has {len(images)} images, but limits.images={most}"
                raise SettingError(source, problem, "raise it")
            try:
                for image in images:
                    if (digest := stored_digest(image)) is not None:
                        self.grid(digest)
                    else:
                        self.vision.check(*(decode(image).size if time.monotonic() < until else size_of(image)))
            except ValueError as error:
                raise SettingError(source, f"row {number}: {error}", "correct it, or remove the row") from error

    async def take_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return tool messages with stored images for `data:` addresses, and text for unusable images and others."""
        if not self.shows or not image_urls(messages):
            return list(messages)
        return await asyncio.to_thread(map_parts, messages, self._take_part)

    def _take_task(self, task: dict[str, Any], source: str, row: int | None) -> dict[str, Any]:
        try:
            taken = {**task, "messages": parts.place_images(task, lambda image: url_of(self._take(image)))}
            if "images" in task:
                taken["images"] = [self._file(image) for image in task["images"]]
        except ValueError as error:
            where = "an image cannot be used" if row is None else f"row {row}"
            raise SettingError(source, f"{where}: {error}", "correct it, or remove it") from error
        return taken

    def _file(self, image: Any) -> str:
        if is_file(image):
            return str(image)
        return str(self.store.path(stored_digest(image) or self._take(image, fits=False)).absolute())

    def _take_part(self, part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image_url":
            return part
        url = part["image_url"]["url"]
        try:
            if not url.startswith("data:"):
                raise ValueError(f"{url[:200]} is an address, which is not fetched")
            return image_part(url_of(self._take(url)))
        except ValueError as error:
            return parts.text_part(f"[image not shown: {error}]")

    def _take(self, image: Any, fits: bool = True) -> str:
        """Store an image, resized for the model if `fits`, and return its digest. Raise ValueError for a bad image."""
        if (digest := stored_digest(image)) is not None:
            self.grid(digest)
            return digest
        if isinstance(image, Image.Image):
            return self._put(image, fits)
        key = hashlib.sha256(content_of(image)).digest(), fits
        with self._lock:
            known = self._taken.get(key)
        # files may have been deleted meanwhile
        if known is None or not self.store.path(known).exists():
            known = self._put(image, fits)
            with self._lock:
                self._taken.put(key, known)
        return known

    def _put(self, image: Any, fits: bool) -> str:
        decoded = decode(image)
        return self.store.put(self.vision.fit(decoded) if fits else decoded)

    # ---- images in messages and rows

    def _grid(self, digest: str) -> Grid:
        with self.store.open(digest) as file:
            return self.vision.grid(Image.open(file))

    def expand(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], list[ImageSpan]]:
        """Expand the images in `ids`, the ids of `messages`, to their image tokens. Return the ids and image spans.
        Raise ValueError if an image is not stored."""
        found: list[tuple[str, Grid]] = []
        for url in image_urls(messages) if self.shows else ():
            if (digest := stored_digest(url)) is None:
                raise ValueError(f"a message has the image {url!r:.100}, which was not stored")
            found.append((digest, self.grid(digest)))
        return self.vision.expand(ids, found)

    def expand_row(self, row: Row, messages: Sequence[Message]) -> Row:
        """Expand the images in a row for supervised training to their image tokens, which are context."""
        ids, images = self.expand(row.token_ids, messages)
        if not images:
            return row
        weights = row.weights if row.weights is not None else [float(one) for one in row.mask]
        expanded = Row(weights=[])
        assert expanded.weights is not None
        rest = iter(images)
        for place, (token, mask, weight) in enumerate(zip(row.token_ids, row.mask, weights, strict=True)):
            is_image = token == self.vision.image_token_id
            count = next(rest).length if is_image else 1
            expanded.mask += [0 if is_image else mask] * count
            expanded.weights += [0.0 if is_image else weight] * count
            expanded.logprobs += [row.logprobs[place]] * count
        expanded.token_ids, expanded.images = ids, images
        return expanded

    def collapse(self, row: Row) -> list[int]:
        """Return the ids of a row with one token for each image, as the chat template writes them."""
        return self.vision.collapse(row.token_ids, row.images) if row.images else row.token_ids

    def files_of(self, messages: Sequence[Message]) -> list[str]:
        """Return the files of the stored images in messages, in order, resized for the model."""
        digests = filter(None, map(stored_digest, image_urls(messages)))
        return [str(self.store.path(digest).absolute()) for digest in digests]

    async def for_endpoint(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages for a chat endpoint, with images as data, in user messages."""
        return await self._with_images(parts.show_in_user_turns(messages))

    async def without_files(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return a row for a program without access to its files, with images as data in its messages."""
        if "images" not in task:
            return task
        rest = {name: value for name, value in task.items() if name != "images"}
        return {**rest, "messages": await self._with_images(task["messages"])}

    async def _with_images(self, messages: Sequence[Message]) -> list[Message]:
        if not image_urls(messages):
            return list(messages)
        return await asyncio.to_thread(map_parts, messages, self._with_data)

    def _with_data(self, part: dict[str, Any]) -> dict[str, Any]:
        digest = stored_digest(part["image_url"]["url"]) if part["type"] == "image_url" else None
        return part if digest is None else image_part(parts.data_url(self.store.png(digest)))


class TextOnly:
    """The counterpart of ShownImages for a model that accepts only text: the chat template gets text for images."""

    vision = None
    shows = False

    async def take_messages(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    def expand(self, ids: list[int], messages: Sequence[Message]) -> tuple[list[int], list[ImageSpan]]:
        return ids, []

    def collapse(self, row: Row) -> list[int]:
        return row.token_ids

    def files_of(self, messages: Sequence[Message]) -> list[str]:
        return []

    async def for_endpoint(self, messages: Sequence[Message]) -> list[Message]:
        return [{**message, "content": text_of(message.get("content") or "")} for message in messages]

    async def without_files(self, task: dict[str, Any]) -> dict[str, Any]:
        return task


Images = ShownImages | TextOnly
"""The image intake of a run's model."""


_SENT = 16_384


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
        png = self.shown.store.png
        read = await asyncio.to_thread(lambda: {digest: data_url(png(digest)) for digest in new}) if new else {}
        return [{"type": "image_url", "url": read.get(digest), "uuid": digest} for digest in digests]

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
    """The digests of the last _SENT images sent to a server, which may have evicted them since."""

    def __init__(self) -> None:
        self._digests: ByteCache[str, bool] = ByteCache(_SENT)

    def __contains__(self, digest: str) -> bool:
        return self._digests.get(digest) is not None

    def note(self, spans: Sequence[ImageSpan]) -> None:
        for span in spans:
            self._digests.put(span.digest, True)

    def forget(self, spans: Sequence[ImageSpan]) -> None:
        for span in spans:
            self._digests.drop(span.digest)
