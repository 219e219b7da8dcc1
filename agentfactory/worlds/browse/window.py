"""`Page`: a long text that the model reads one window at a time."""

import re
from collections.abc import Iterator, Sequence

WINDOW_CHARACTERS = 4000
"""Default size of a window, about a thousand tokens of English."""
_SURROUNDINGS = 120
"""Characters of context that `find` shows before and after a match."""
_SHOWN = 8
_QUOTED = 80
"""Maximum characters of the search text that `find` repeats."""


class Page:
    """A document split into windows of at most `size` characters, at ends of paragraphs, lines or words. Texts for the
    model call a window a page: "page 2 of 7". `text`: plain text or markdown, with links as `[label][3]`. `links`: the
    addresses of the links; link 3 has the address `links[2]`."""

    def __init__(self, title: str, text: str, links: Sequence[str] = (), size: int = WINDOW_CHARACTERS) -> None:
        if size < 1:
            raise ValueError(f"size: got {size}; it has to be at least 1")
        self.title, self.text, self.links = title, text, tuple(links)
        self._ends = list(_ends(text, size))

    @property
    def count(self) -> int:
        return len(self._ends)

    def window(self, number: int) -> str:
        """Return window `number`, from 1, preceded by the title and its position. Raises ValueError if there is no such
        window; the message tells the model the valid numbers."""
        if not 1 <= number <= self.count:
            there_is = "only page 1" if self.count == 1 else f"pages 1 to {self.count}"
            raise ValueError(f"there is no page {number}: this document has {there_is}")
        start = self._ends[number - 2] if number > 1 else 0
        shown = self.text[start : self._ends[number - 1]].strip("\n") or "(no text)"
        place = f"page {number} of {self.count}"
        return f"{self.title} ({place})\n\n{shown}" if self.title else f"({place})\n\n{shown}"

    def find(self, text: str) -> str:
        """Return the occurrences of `text`, with their windows; case and kinds of white space do not matter."""
        words = text.split()
        if not words:
            return "Nothing to find: the text is empty."
        shown = " ".join(words)
        shown = shown if len(shown) <= _QUOTED else f"{shown[:_QUOTED]}..."
        pattern = re.compile(r"\s++".join(map(re.escape, words)), re.IGNORECASE)
        passages: list[str] = []
        count, window, seen = 0, 1, -1
        for match in pattern.finditer(self.text):
            count += 1
            while match.start() >= self._ends[window - 1] and window < self.count:
                window += 1
            if len(passages) < _SHOWN and match.start() >= seen:
                passage, seen = self._surroundings(*match.span())
                passages.append(f"page {window}: {passage}")
        if not count:
            return f'"{shown}" does not occur in this document.'
        times = "once" if count == 1 else f"{count} times"
        first = f"; the first {_SHOWN} places" if len(passages) == _SHOWN < count else ""
        return "\n".join([f'"{shown}" occurs {times}{first}:', *passages])

    def _surroundings(self, start: int, end: int) -> tuple[str, int]:
        """Return the text around `start` to `end`, extended by whole words, on one line, and its end position."""
        first = max(0, start - _SURROUNDINGS)
        last = min(len(self.text), end + _SURROUNDINGS)
        if first:
            first = next((at + 1 for at in range(first, start) if self.text[at].isspace()), first)
        if last < len(self.text):
            last = next((at for at in range(last, end, -1) if self.text[at].isspace()), last)
        passage = " ".join(self.text[first:last].split())
        return f"{'... ' if first else ''}{passage}{' ...' if last < len(self.text) else ''}", last


def _ends(text: str, size: int) -> Iterator[int]:
    """Yield the end position of each window: after the last paragraph, line or word that still fits."""
    start = 0
    while len(text) - start > size:
        start = _end(text, start, start + size)
        yield start
    yield len(text)


def _end(text: str, start: int, limit: int) -> int:
    """Return the best end between `start` and `limit`: a paragraph or line end in the second half, else a word end."""
    for separator, earliest in (("\n\n", (start + limit) // 2), ("\n", (start + limit) // 2), (" ", start)):
        at = text.rfind(separator, earliest, limit)
        if at > start:
            return at + len(separator)
    return limit
