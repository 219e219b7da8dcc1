"""The tool `search` in chains, on each of its sources."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.worlds.search import sources
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.search import Search
from tests.worlds.opening import tools_of
from tests.worlds.search.corpora import index_of

searching = partial(tools_of, "search")


async def call(chain: ToolSession, tool: str, **arguments: Any) -> ToolResult:
    return await chain.call(ToolCall("c", tool, arguments))


async def test_a_chain_searches_opens_and_finds(tmp_path: Path) -> None:
    async with searching(source=str(index_of(tmp_path)), count=2) as toolset:
        assert [spec.name for spec in toolset.specs] == ["search", "open", "find"]
        async with toolset.chain("a", {}) as chain:
            found = await call(chain, "search", query='author: "Faust?')
            assert found.content == 'Doc 1(Title: "Faust") A tragedy by Goethe about a scholar and a wager.'
            assert found.info == {"documents": ["f"]}
            opened = await call(chain, "open", doc=1)
            assert opened.content == "Faust (page 1 of 1)\n\nA tragedy by Goethe about a scholar and a wager."
            assert opened.info == {"opened": "f"}
            assert str((await call(chain, "find", text="wager")).content).startswith('"wager" occurs once:\npage 1: ')
            assert (await call(chain, "search", query="zyzzyva")).content == "No results."
            assert len((await call(chain, "search", query="tragedy")).info["documents"]) == 2


async def test_a_long_document_is_shown_in_part_and_opened_in_pages(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(2000))
    index = index_of(tmp_path, [Passage("long", f'"Long"\n{text}')])
    async with searching(source=str(index)) as toolset, toolset.chain("a", {}) as chain:
        found = str((await call(chain, "search", query="word1999")).content)
        assert len(found) < 2100
        assert found.endswith("... (open it to read on)")
        last = str((await call(chain, "open", doc=1, page=5)).content)
        assert last.startswith("Long (page 5 of 5)\n\n")
        assert last.endswith("word1999")
        assert "page 5: ... " in str((await call(chain, "find", text="word1990")).content)


async def test_chains_see_nothing_of_each_other_and_share_one_source(tmp_path: Path) -> None:
    source = str(index_of(tmp_path))
    async with searching(source=source) as toolset:
        async with toolset.chain("a", {}) as one, toolset.chain("b", {}) as other:
            await asyncio.gather(call(one, "search", query="hamlet"), call(other, "search", query="wager"))
            assert (await call(one, "open", doc=1)).info == {"opened": "h"}
            assert (await call(other, "open", doc=1)).info == {"opened": "f"}
            assert len(sources._shared) == 1
        async with toolset.chain("c", {}) as later:
            assert (await call(later, "find", text="a")).error is CallError.TOOL_ERROR
    assert not sources._shared


class Engine:
    """An engine that knows whole pages."""

    def __init__(self, options: object) -> None:
        assert options is None

    async def search(self, query: str, count: int) -> list[Passage]:
        return [Passage("http://a/", f"A page\na snippet on {query}", url="http://a/")]

    async def open(self, id: str) -> str | None:
        return f"A page\nall about {id}"

    async def close(self) -> None:
        """Nothing is open."""


async def test_an_engine_is_named_and_its_pages_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.ENGINES, "engine", f"{__name__}:Engine")
    async with searching(source="engine") as toolset, toolset.chain("a", {}) as chain:
        found = await call(chain, "search", query="rain")
        assert found.content == "Doc 1(Title: A page) a snippet on rain (http://a/)"
        assert (await call(chain, "open", doc=1)).content == "A page (page 1 of 1)\n\nall about http://a/"
    with pytest.raises(SettingError, match="ranking: got 'bm25', but only a local index has rankings"):
        Search("engine", ranking="bm25")


def test_a_source_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    fix = "fix: name the folder of an index, the address of a retrieval server"
    with pytest.raises(SettingError, match=f"source: there is no 'nowhere'; {fix}"):
        Search("nowhere")
    with pytest.raises(SettingError, match="there is no index in"):
        Search(str(tmp_path))
    index = str(index_of(tmp_path))
    with pytest.raises(SettingError, match="ranking: got 'best'; fix: use one of bm25, dense, hybrid"):
        Search(index, ranking="best")
    with pytest.raises(SettingError, match=r"ranking: got dense, and .* has no vectors; fix: build it with --dense"):
        Search(index, ranking="dense")
    assert not sources._shared


class Slow:
    """A source that answers on command."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[list[Passage]]] = []

    async def search(self, query: str, count: int) -> list[Passage]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def open(self, id: str) -> str | None:
        return None

    async def close(self) -> None:
        pass


async def test_equal_searches_at_once_are_one() -> None:
    slow = Slow()
    shared = sources.SharedSource("slow", slow)

    async def begin(*queries: str) -> list[asyncio.Task[list[Passage]]]:
        begun = [asyncio.create_task(shared.search(query, 3)) for query in queries]
        # a turn of the loop for the chains, and one for the source
        for _ in range(2):
            await asyncio.sleep(0)
        return begun

    first, second, other, third = await begin("a", "a", "b", "a")
    assert len(slow.asked) == 2
    first.cancel()  # a chain is cancelled
    slow.asked[0].set_result([Passage("1", "one")])
    assert await second == await third == [Passage("1", "one")]
    assert await shared.search("a", 3) == [Passage("1", "one")]
    slow.asked[1].set_exception(ToolInfrastructureError("down"))
    with pytest.raises(ToolInfrastructureError, match="down"):
        await other
    [again] = await begin("b")
    assert len(slow.asked) == 3  # a failed search is not cached
    assert shared.gauges() == {"searches": 6, "remembered": 3}
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await again
