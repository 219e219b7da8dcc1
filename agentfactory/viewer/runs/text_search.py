"""Text search in saved chains: line by line from the files, a little at a time, so that nothing blocks."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from agentfactory.viewer.runs.chain_index import Index, Line
from agentfactory.viewer.runs.saved_groups import outline, texts_of

SECONDS = 0.3
_KEPT = 8


class TextSearch:
    """A search in the order of the index, which keeps the matches in `found`, and goes on when it grows."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self._text = text.lower()
        plain = self._text.isascii() and self._text.isprintable() and not set(self._text) & {'"', "\\"}
        self._bytes = self._text.encode() if plain else None
        """The text as it appears in the file, if JSON does not escape any of it; else None."""
        self._last = 0
        self._lock = threading.Lock()

    def go_on(self, index: Index, bytes_of: Callable[[Line], bytes], seconds: float) -> int:
        """Search for at most `seconds`; return the number of chains still to be searched."""
        until = time.monotonic() + seconds
        with self._lock:
            while lines := index.lines_after(self._last, 200):
                for line in lines:
                    if places := self._places(bytes_of, line):
                        index.note_found(self.number, line, places)
                    self._last = line.last
                    if time.monotonic() > until:
                        return index.left_after(self._last)
            return 0

    def _places(self, bytes_of: Callable[[Line], bytes], line: Line) -> list[int]:
        try:
            raw = bytes_of(line)
            if self._bytes is not None and self._bytes not in raw.lower():
                return []
            group = outline(raw)
            return [
                place
                for place, chain in enumerate(group["trajectories"])
                if any(self._text in text.lower() for text in texts_of(group["task"], chain))
            ]
        except (OSError, ValueError):
            return []  # the file was cut or deleted meanwhile: the index will forget the line too


class TextSearches:
    """A cache of the last few searches, so that further pages and new chains need no new search."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[str, TextSearch] = OrderedDict()
        self._made = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> TextSearch:
        with self._lock:
            if text not in self._kept:
                self._made += 1
                self._kept[text] = TextSearch(self._made, text)
            self._kept.move_to_end(text)
            if len(self._kept) > _KEPT:
                _, old = self._kept.popitem(last=False)
                self._index.drop_search(old.number)
            return self._kept[text]
