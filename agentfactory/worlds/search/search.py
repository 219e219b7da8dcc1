"""`Search`: tools to search an index, a retrieval server or the web, and to read the results."""

from collections.abc import Mapping
from typing import Any

from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import tool
from agentfactory.worlds.browse.window import Page
from agentfactory.worlds.search import sources
from agentfactory.worlds.search.engine import EngineOptions
from agentfactory.worlds.search.passage import Passage


class Search(Environment):
    """An environment with tools to search for passages and read them. It has no reward: set `rewards:` in the recipe.

    A search's info has `documents`, the ids of the passages found; the info of `open` has `opened`, the passage's id.

    Args:
        source: where to search: the folder of an index (`agentfactory index build`), the address of a retrieval server
            (http://...), or the name of an online engine.
        count: results per search.
        shown_characters: characters of each result that a search shows; the model opens a result to read on. A passage
            of 100 words, as in Search-R1's corpora, has a third of the default.
        ranking: ranking of an index: bm25, dense or hybrid; default: hybrid if it was built with a dense model, else
            bm25.
        engine: options of an online engine: `cache`, a folder; `calls` and `cost`, the budget in requests and dollars;
            `price`, the dollars per request; `calls_per_second`.

    Raises:
        SettingError: the source does not exist, or an option is out of range.
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
        """Return counts since the start: searches, searches answered from memory, and an online engine's own counts."""
        return self._source.gauges()

    async def close(self) -> None:
        await sources.release(self._source)


def _result(number: int, passage: Passage, characters: int) -> str:
    title, _, text = passage.contents.partition("\n")
    if len(text) > characters:
        text = f"{text[:characters]}... (open it to read on)"
    where = f" ({passage.url})" if passage.url == passage.id else ""
    return f"Doc {number}(Title: {title}) {text}{where}"
