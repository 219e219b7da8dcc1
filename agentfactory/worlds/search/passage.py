"""`Passage`, a search result, and `Source`, the protocol of all search backends."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Passage:
    """A text with a title, as in Search-R1's corpora (Jin et al., 2025, arXiv:2503.09516). `contents` has the title on
    the first line, usually in double quotes, then the text. A higher `score` is a better match, in the source's own
    unit; None if the source gives no score."""

    id: str
    contents: str
    score: float | None = None
    url: str | None = None

    @property
    def title(self) -> str:
        """The first line, without the enclosing quotes."""
        title = self.contents.partition("\n")[0].strip()
        return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title

    @property
    def text(self) -> str:
        """The contents after the first line."""
        return self.contents.partition("\n")[2]


class Source(Protocol):
    """A search backend. One object serves all chains of a process."""

    async def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages, best first. Any text is a valid query; an empty one finds nothing. Raises
        ToolInfrastructureError if the source does not answer."""
        ...

    async def open(self, id: str) -> str | None:
        """Return the whole document as text or markdown with its title on the first line; None if it is unavailable, or
        if passages are already whole documents. Raises ToolInfrastructureError if the source does not answer."""
        ...

    async def close(self) -> None:
        """Release connections and files."""
        ...


def encodable(text: str) -> str:
    """Replace lone surrogates in `text`: JSON can express them, UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
