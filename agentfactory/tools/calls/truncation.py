"""Truncation of long results: cut in the middle, with a marker that the model sees."""

import re
from collections.abc import Callable
from typing import NamedTuple

from agentfactory.base.messages import Content

Cut = Callable[[str, int], str | None]
"""(text, most) -> the text cut in the middle, with a visible marker; None if it fits."""


class LeftOut(NamedTuple):
    """The cut part of a text: `size` of its `total` bytes, and `missing`, by which it became shorter."""

    size: int
    total: int
    missing: int


def truncated(content: Content, most: int, cut: Cut | None) -> Content | None:
    """Cut the text in `content` to `most` tokens or bytes; None if it fits. Several texts become one; images stay."""
    assert cut is not None
    if isinstance(content, str):
        return cut(content, most)
    texts = [part["text"] for part in content if part["type"] == "text"]
    shorter = cut("\n".join(texts), most)
    if shorter is None:
        return None
    first = next(index for index, part in enumerate(content) if part["type"] == "text")
    kept = [part for part in content if part["type"] != "text"]
    kept.insert(first, {"type": "text", "text": shorter})
    return kept


def cut_bytes(text: str, most: int, total: int | None = None) -> str | None:
    """Return the first and the last bytes of `text`, `most` together, with `[... N of M bytes left out ...]` between
    them; None if it fits. Bytes are UTF-8. `total` is M if the text was cut before."""
    if len(text) <= most // 4 or size_of(text) <= most:
        return None
    half, total = most // 2, size_of(text) if total is None else total
    head = text[:half].encode("utf-8", "replace")[:half]
    return _joined(head, text[half - most :].encode("utf-8", "replace")[half - most :], total)


def size_of(text: str) -> int:
    """Return the UTF-8 size of `text` in bytes, without copying it."""
    if text.isascii():
        return len(text)
    return sum(len(text[start : start + _PIECE].encode("utf-8", "replace")) for start in range(0, len(text), _PIECE))


def left_out_of(text: str, most: int) -> LeftOut | None:
    """Return the part that `cut_bytes` left out, if `text` is longer than `most` bytes because of its marker."""
    if len(text) <= most // 4:
        return None
    marker = _MARKER.search(text, 0, most // 2 + _MARKER_LENGTH)
    if marker is None or not most < size_of(text) <= most + len(marker[0]):
        return None
    count = int(marker[1])
    return LeftOut(count, int(marker[2]), count - len(marker[0]))


class Middle:
    """A text that arrives in pieces and is cut like `cut_bytes`, to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._head_most = most // 2
        self._tail_most = most - most // 2
        self._total = 0

    def add(self, piece: bytes) -> None:
        self._total += len(piece)
        room = self._head_most - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:][-self._tail_most :]
        del self._tail[: -self._tail_most]

    def text(self) -> str:
        if len(self._head) + len(self._tail) == self._total:
            return (self._head + self._tail).decode("utf-8", "replace")
        return _joined(self._head, self._tail, self._total)


def _joined(head: bytes | bytearray, tail: bytes | bytearray, total: int) -> str:
    """Join both ends of a text of `total` bytes, without characters that were cut in two."""
    before, after = head.decode("utf-8", "ignore"), tail.decode("utf-8", "ignore")
    left_out = total - size_of(before) - size_of(after)
    return f"{before}\n[... {left_out} of {total} bytes left out ...]\n{after}"


_PIECE = 1 << 20
_MARKER = re.compile(r"\n\[\.\.\. (\d{1,15}) of (\d{1,15}) bytes left out \.\.\.\]\n")
_MARKER_LENGTH = 80
