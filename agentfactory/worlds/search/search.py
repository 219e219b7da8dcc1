"""`Search`: the tool with which a model searches an index, a retrieval server or the web, and reads what it found."""

from collections.abc import Mapping
from typing import Any

from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import tool
from agentfactory.worlds.browse.window import Page
from agentfactory.worlds.search import sources
from agentfactory.worlds.search.engines.engine import EngineOptions
from agentfactory.worlds.search.passage import Passage


class Search(Environment):
    """Search for passages, and read them on. It judges nothing: give the recipe `rewards:`.

    The results' info has `documents`, the ids of the passages found; that of an opened one has `opened`, its id.

    Args:
        source: where to search: the folder of an index (`agentfactory index build`), the address of a retrieval server
            (http://...), or the name of an online engine.
        count: results of a search.
        shown_characters: text of a result that a search shows; to read on, the model opens it. A passage of 100 words,
            as in Search-R1's corpora, has a third of the default.
        ranking: bm25, dense or hybrid, of an index; default: hybrid if it was built with a dense model, else bm25.
        engine: how an online engine is used: `cache`, a folder; `calls`, `cost` and `price`, a budget of requests or
            dollars, and the dollars for one request; `calls_per_second`.

    Raises:
        SettingError: there is no such source, or an option is out of its range.
    """

    def __init__(
        self,
        source: str,
        count: int = 3,
        shown_characters: int = 2000,
        ranking: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        for name, number in (("count", count), ("shown_characters", shown_characters)):
            if number < 1:
                raise ValueError(f"{name}: got {number}; it has to be at least 1")
        self._source = sources.acquire(source, ranking, None if engine is None else EngineOptions.parse(engine))
        self._count = count
        self._shown_characters = shown_characters
        self._found: list[Passage] = []
        self._page: Page | None = None

    async def reset(self, **task: Any) -> None:
        """Begin without results."""
        self._found, self._page = [], None

    @tool
    async def search(self, query: str) -> dict[str, Any]:
        """Search for passages about a topic. Returns the best ones, as Doc 1, Doc 2 and so on.

        Args:
            query: What to look for, in a few words.
        """
        self._found = await self._source.search(query, self._count)
        self._page = None
        shown = [_result(number, passage, self._shown_characters) for number, passage in enumerate(self._found, 1)]
        text = "\n".join(shown) or "No results."
        return {"observation": text, "documents": [passage.id for passage in self._found]}

    @tool
    async def open(self, doc: int, page: int = 1) -> dict[str, Any]:
        """Read a result of the last search in full.

        Args:
            doc: The number of the result: 2 for Doc 2.
            page: Which page of it, if it is long.
        """
        if not 1 <= doc <= len(self._found):
            there_is = f"the last search found Doc 1 to Doc {len(self._found)}" if self._found else "search first"
            raise ValueError(f"there is no Doc {doc}: {there_is}")
        passage = self._found[doc - 1]
        whole = await self._source.open(passage.id)
        first_line = passage.contents.partition("\n")[0]
        self._page = Page(passage.title, (whole or passage.contents).removeprefix(f"{first_line}\n"))
        return {"observation": self._page.window(page), "opened": passage.id}

    @tool
    async def find(self, text: str) -> str:
        """Find a text in the result that was opened last.

        Args:
            text: The words to find, as they stand there.
        """
        if self._page is None:
            raise ValueError("nothing is open: open a result first")
        return self._page.find(text)

    def gauges(self) -> dict[str, float]:
        """Return the counts since the start: searches, those answered from memory, and what an online engine counts."""
        return self._source.gauges()

    async def close(self) -> None:
        """Give the source back."""
        await sources.release(self._source)


def _result(number: int, passage: Passage, characters: int) -> str:
    """Return a passage in Search-R1's form, whose title is the first line as it stands in the corpus. One of an online
    engine, whose id is its address, is shown with it, so that it can be browsed."""
    title, _, text = passage.contents.partition("\n")
    if len(text) > characters:
        text = f"{text[:characters]}... (open it to read on)"
    where = f" ({passage.url})" if passage.url == passage.id else ""
    return f"Doc {number}(Title: {title}) {text}{where}"
