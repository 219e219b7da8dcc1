"""`Passage`: what a search finds; `Source`: where it looks."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Passage:
    """A text with a title, as in Search-R1's corpora (Jin et al., 2025, arXiv:2503.09516).

    `contents` is the title on the first line, usually in double quotes, and then the text. `score` is higher for a
    better match, in the source's own unit; None if the source gives none.
    """

    id: str
    contents: str
    score: float | None = None
    url: str | None = None

    @property
    def title(self) -> str:
        """The first line, without quotes around it."""
        title = self.contents.partition("\n")[0].strip()
        return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title

    @property
    def text(self) -> str:
        """What follows the first line."""
        return self.contents.partition("\n")[2]


class Source(Protocol):
    """Where a search looks. One object serves all chains of a process."""

    async def search(self, query: str, count: int) -> list[Passage]:
        """Return at most `count` passages, the best first. Any text is a valid query; an empty one finds nothing.

        Raises ToolInfrastructureError if the source does not answer.
        """
        ...

    async def open(self, id: str) -> str | None:
        """Return the whole document as text or markdown, its title on the first line; None if it cannot be had, or if
        passages are whole.

        Raises ToolInfrastructureError if the source does not answer.
        """
        ...

    async def close(self) -> None:
        """Release connections and files."""
        ...


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which JSON can express and UTF-8 cannot, replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
