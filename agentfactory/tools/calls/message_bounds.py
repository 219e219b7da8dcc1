"""Size bounds on a server's messages on arrival, before a line of JSON is parsed into many times its size."""

import json
import re
from codecs import IncrementalDecoder, getincrementaldecoder
from typing import Any

from agentfactory.tools.calls.truncation import Middle

BINARY_BYTES = 16 << 20
"""Maximum size of the images, other files and info of one result, in bytes of base64 or JSON."""
TOO_LARGE = -32050
"""Code of the JSON-RPC error that replaces a message that cannot be cut."""

_LEAST_TEXT = 1 << 20
"""Texts up to this length always pass, because the list of a server's tools is a message too."""
_STRUCTURE = 2
"""Maximum JSON of small parts in a message, as a multiple of the longest text: parsed, it takes many times its size."""
_TEXTS = 16
"""Maximum size of a message without its binary parts, as a multiple of the longest text."""
_SHORT = 1024
_ENDS = 512
"""Bytes of either end of a message that are kept to find its id."""
_BREAK = re.compile(rb"[\r\n]")
_IN_STRING = re.compile(rb'(?:[^"\\\r\n]++|\\u[0-9a-fA-F]{4}|\\[^u\r\n])*+')
_OUTSIDE = re.compile(rb'[^"\r\n]++')
_ID = rb'"id"\s*:\s*(-?\d+|"[^"\\]*")'
_ID_FIRST = re.compile(rb'[^{]*\{\s*(?:"jsonrpc"\s*:\s*"2.0"\s*,\s*)?' + _ID)
_ID_LAST = re.compile(_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2.0"\s*)?\}\s*\Z')


def passing(most: int) -> int:
    """Return the maximum bytes of a passing text if results are cut to `most`."""
    return max(most, _LEAST_TEXT)


def id_of(message: bytes) -> int | str | None:
    """Extract the id of a JSON-RPC message, which may be invalid JSON, from its ends; None if there is none."""
    found = _ID_FIRST.match(message[:_ENDS]) or _ID_LAST.search(message[-_ENDS:])
    try:
        return None if found is None else json.loads(found[1])
    except (ValueError, RecursionError):  # control characters, or bytes that are no UTF-8
        return None


def most_bytes(result_bytes: int) -> int:
    """Return the maximum size of a message that the filter passes, with its prefix."""
    return BINARY_BYTES + (_TEXTS + 1) * passing(result_bytes)


class MessageFilter:
    """A filter of JSON-RPC messages that cuts strings to `passing(most)` bytes like `truncation.cut_bytes`. Strings
    under `data`, `blob` or `_meta` stay whole, up to BINARY_BYTES together. A message that is still too large becomes
    an error with its id. `lines`: each line is a message; else everything until `end` is one."""

    def __init__(self, most: int, lines: bool = True) -> None:
        self._most = passing(most)
        self._lines = lines
        self._waiting = bytearray()  # the message's beginning, while it is short
        self._scan: _Scan | None = None

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a received chunk; return the messages that are complete, each with its line end."""
        if not self._lines:
            self._add(chunk)
            return []
        found, start = [], 0
        while end := _BREAK.search(chunk, start):
            self._add(chunk[start : end.start()])
            found.append(self.end() + end[0])
            start = end.end()
        self._add(chunk[start:])
        return found

    def _add(self, piece: bytes) -> None:
        if self._scan is None:
            self._waiting += piece
            if len(self._waiting) <= self._most:
                return
            self._scan, piece = _Scan(self._most), bytes(self._waiting)
            self._waiting.clear()
        self._scan.add(piece)

    def end(self) -> bytes:
        """Return the last message, which has no line end; empty if there is none."""
        if self._scan is not None:
            message, self._scan = self._scan.message(), None
            return message
        message = bytes(self._waiting)
        self._waiting.clear()
        return message


class _Scan:
    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self._first, self._last = b"", b""
        self._carried = b""  # the beginning of an escape whose rest has not arrived
        self._start: int | None = None  # position in _kept of the open string's quote
        self._middle: _OpenText | None = None  # set if the open string is a text that is too long
        self._key = b""  # the last string that was closed
        self._depth = 0
        self._meta: int | None = None  # the depth around `_meta`, while in it
        self._binary = self._small = 0
        self._too_large = ""

    def add(self, piece: bytes) -> None:
        if not self._first:
            self._first = piece[:_ENDS]
        self._last = (self._last + piece)[-_ENDS:]
        if self._too_large:
            return
        piece, self._carried = self._carried + piece, b""
        position = 0
        while position < len(piece) and not self._too_large:
            if self._start is None:
                position = self._outside(piece, position)
            else:
                position = self._inside(piece, position, self._start)
            if self._binary > BINARY_BYTES:
                most = f"{BINARY_BYTES >> 20} MiB of images, files or info"
                self._too_large = f"The result is too large: it has more than {most}."
            elif self._small > _STRUCTURE * self._most or len(self._kept) - self._binary > _TEXTS * self._most:
                most = f"{_STRUCTURE * self._most} bytes"
                self._too_large = f"The result is too large: its JSON has more than {most}. Ask for less."
            if self._too_large:
                self._kept.clear()

    def message(self) -> bytes:
        if not self._too_large:
            return bytes(self._kept + self._carried)
        prefix = self._first[: max(0, self._first.find(b"{"))]  # the prefix of an event stream
        number = id_of(self._first + self._last)
        answer: dict[str, Any] = {"method": "notifications/agentfactory/too_large"}
        if number is not None:
            answer = {"id": number, "error": {"code": TOO_LARGE, "message": self._too_large}}
        return prefix + json.dumps({"jsonrpc": "2.0", **answer}).encode()

    def _outside(self, piece: bytes, position: int) -> int:
        if piece[position : position + 1] in (b"\r", b"\n"):
            self._kept += piece[position : position + 1]
            return position + 1
        if found := _OUTSIDE.match(piece, position):
            part, position = found[0], found.end()
            if self._meta is None and self._key == b'"_meta"' and part.lstrip().startswith(b":"):
                self._meta = self._depth
            self._depth += part.count(b"{") + part.count(b"[") - part.count(b"}") - part.count(b"]")
            if self._meta is not None and self._depth <= self._meta:
                self._meta = None
            self._binary += len(part) if self._meta is not None else 0
            self._small += len(part) if self._meta is None else 0
            self._kept += part
        if position < len(piece) and piece[position] == _QUOTE:
            self._start = len(self._kept)
            self._kept += b'"'
            position += 1
        return position

    def _inside(self, piece: bytes, position: int, start: int) -> int:
        found = _IN_STRING.match(piece, position)
        assert found is not None
        part, position = found[0], found.end()
        binary = self._meta is not None or self._key in (b'"data"', b'"blob"')
        if binary:
            self._binary += len(part)
        if self._middle is not None:
            self._middle.add(part)
        else:
            self._kept += part
            if not binary and len(self._kept) - start > self._most:
                self._middle = _OpenText(self._most)
                self._middle.add(bytes(self._kept[start + 1 :]))
                del self._kept[start:]
        if position == len(piece):
            return position
        if piece[position] != _QUOTE and len(piece) - position < len(rb"\u0000"):
            self._carried = piece[position:]
            return len(piece)
        if piece[position] != _QUOTE:  # neither a string's end nor an escape
            self._too_large = "The result is not JSON."
            return len(piece)
        if self._middle is not None:
            self._kept += json.dumps(self._middle.text(), ensure_ascii=False).encode()
            self._middle = None
        else:
            self._kept += b'"'
        short = len(self._kept) - start < _SHORT
        self._small += len(self._kept) - start if short and not binary else 0
        self._key = bytes(self._kept[start:]) if short else b""
        self._start = None
        return position + 1


class _OpenText(Middle):
    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._decoder: IncrementalDecoder = getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> None:
        """Add a piece, which must not end within an escape."""
        text: str = json.loads(f'"{self._decoder.decode(piece)}"', strict=False)
        super().add(text.encode("utf-8", "replace"))


_QUOTE = ord('"')
