"""Sources by their names in a recipe, each opened once per process and shared by its chains."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentfactory.tools.environments.shared import Shared
from agentfactory.tools.errors import SettingError, short
from agentfactory.tools.messages import ToolInfrastructureError
from agentfactory.tools.user_code.loading import load_object
from agentfactory.worlds.search.engines.engine import Engine, EngineOptions
from agentfactory.worlds.search.passage import Passage, Source
from agentfactory.worlds.search.ranking import Index, open_index
from agentfactory.worlds.search.retrieval_client import RetrievalClient

ENGINES = {
    name: f"agentfactory.worlds.search.engines.{name}:{name.title()}"
    for name in ("brave", "searxng", "serper", "tavily", "wikipedia")
}
"""Name of an online engine -> `package.module:CLASS`, an Engine, loaded on first use."""
_REMEMBERED = 10_000
"""Searches whose results a process keeps: the chains of a group ask the same."""


class IndexSource:
    """An index of this machine as a Source; it is searched in as many threads as there are processors."""

    def __init__(self, index: Index) -> None:
        self._index = index
        # more threads would only make each search wait for the others
        self._threads = ThreadPoolExecutor(os.cpu_count(), "search")

    async def search(self, query: str, count: int) -> list[Passage]:
        """See Source."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._search, query, count)

    async def open(self, id: str) -> str | None:
        """Return None: what a search finds is whole."""
        return None

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    def _search(self, query: str, count: int) -> list[Passage]:
        try:
            return self._index.search(query, count)
        except BaseException as error:  # boundary: on a damaged file, tantivy panics, which is no Exception
            raise ToolInfrastructureError(f"the index cannot be searched: {type(error).__name__}: {error}") from error


class SharedSource:
    """A source with its last searches, for all who have acquired it. `key` is what it was acquired by."""

    def __init__(self, key: Hashable, source: Source) -> None:
        self.key = key
        self.source = source
        self._found: OrderedDict[tuple[str, int], asyncio.Task[list[Passage]]] = OrderedDict()
        self._searches = self._remembered = 0

    async def search(self, query: str, count: int) -> list[Passage]:
        """See Source. An equal search is answered from memory, or by one that is under way; one that fails is
        forgotten."""
        asked = (query, count)
        self._searches += 1
        if asked in self._found:
            self._remembered += 1
            self._found.move_to_end(asked)
        else:
            # a task of its own, because a chain that ends must not end the search of the others
            task = self._found[asked] = asyncio.create_task(self.source.search(query, count), name="search")
            task.add_done_callback(lambda task: self._ended(asked, task))
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return await asyncio.shield(self._found[asked])

    def _ended(self, asked: tuple[str, int], task: "asyncio.Task[list[Passage]]") -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._found.get(asked) is task:
            del self._found[asked]

    async def open(self, id: str) -> str | None:
        """See Source."""
        return await self.source.open(id)

    async def close(self) -> None:
        """Give up the searches that are under way, and close the source."""
        searches = list(self._found.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        await self.source.close()

    def gauges(self) -> dict[str, float]:
        """Return the counts since the start: searches, those answered from memory, and what an online engine counts."""
        counts = {"searches": float(self._searches), "remembered": float(self._remembered)}
        return counts | (self.source.gauges() if isinstance(self.source, Engine) else {})


_shared: Shared[SharedSource] = Shared()


def acquire(name: str, ranking: str | None = None, engine: EngineOptions | None = None) -> SharedSource:
    """Return the source of this name, opened if nobody has it yet; give it back by `release`.

    Args:
        name: The folder of an index, the address of a retrieval server, or one of ENGINES.
        ranking: See `open_index`.
        engine: How an online engine is used.

    Raises:
        SettingError: there is no such source, or it cannot rank so, or is no engine.
    """
    key = (name, ranking, engine)
    return _shared.acquire(key, lambda: SharedSource(key, _open(name, ranking, engine)))


async def release(shared: SharedSource) -> None:
    """Give a source back; the last one to do so closes it."""
    if _shared.release(shared.key) is not None:
        await shared.close()


def _open(name: str, ranking: str | None, engine: EngineOptions | None) -> Source:
    is_address = name.startswith(("http://", "https://"))
    if engine is not None and name not in ENGINES:
        raise SettingError("engine", f"source is {short(name)}, which is no online engine", "remove it")
    if ranking is not None and (is_address or name in ENGINES):
        raise SettingError("ranking", f"got {ranking!r}, but only an index on this machine can be ranked", "remove it")
    if is_address:
        return RetrievalClient(name)
    if name in ENGINES:
        return load_object(name, Path(), ENGINES)(engine)
    folder = Path(name).expanduser()
    if not folder.is_dir() and "/" not in name:
        fix = f"name the folder of an index, the address of a retrieval server, or an engine ({', '.join(ENGINES)})"
        raise SettingError("source", f"there is no {name!r}", fix)
    return IndexSource(open_index(folder, ranking))
