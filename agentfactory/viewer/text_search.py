"""Text search through saved chains: line by line from the files, a little at a time, so that nothing stalls."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from agentfactory.viewer.index import Index, Line
from agentfactory.viewer.saved_groups import outline, read_bytes, texts_of

SECONDS = 0.3
"""How long one request searches on."""
_KEPT = 8
_CHAINS_AT_ONCE = 200


class TextSearch:
    """Goes through the lines in the order of the index, whose table `found` keeps what it finds. As the index grows,
    it goes on where it stopped."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self._text = text.lower()
        plain = self._text.isascii() and self._text.isprintable() and not set(self._text) & {'"', "\\"}
        self._bytes = self._text.encode() if plain else None
        """As it would stand in the file, where JSON escapes nothing of it."""
        self._last = 0
        self._lock = threading.Lock()

    def go_on(self, index: Index, path_of: Callable[[Line], Path], seconds: float) -> int:
        """Search for so long at most; returns the number of chains that are still to be searched."""
        until = time.monotonic() + seconds
        with self._lock:
            while lines := index.lines_after(self._last, _CHAINS_AT_ONCE):
                for line in lines:
                    if places := self._places(path_of, line):
                        index.note_found(self.number, line, places)
                    self._last = line.last
                    if time.monotonic() > until:
                        return index.left_after(self._last)
            return 0

    def _places(self, path_of: Callable[[Line], Path], line: Line) -> list[int]:
        try:
            raw = read_bytes(path_of(line), line.byte, line.length)
            if self._bytes is not None and self._bytes not in raw.lower():
                return []
            group = outline(raw)
            return [
                place
                for place, chain in enumerate(group["trajectories"])
                if any(self._text in text.lower() for text in texts_of(group["task"], chain))
            ]
        except (OSError, ValueError):
            return []  # the file was cut or deleted since: the index will forget the line too


class TextSearches:
    """The last few searches, so that further pages and new chains cost no new search."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[str, TextSearch] = OrderedDict()
        self._made = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> TextSearch:
        """The search for a text."""
        with self._lock:
            if text not in self._kept:
                self._made += 1
                self._kept[text] = TextSearch(self._made, text)
            self._kept.move_to_end(text)
            if len(self._kept) > _KEPT:
                _, old = self._kept.popitem(last=False)
                self._index.drop_search(old.number)
            return self._kept[text]
