"""Search sources by their names in a recipe. Each is opened once per process and shared by its chains."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.environments.shared import Shared
from agentfactory.worlds.search.engines.engine import Engine, EngineOptions
from agentfactory.worlds.search.passage import Passage, Source
from agentfactory.worlds.search.ranking import Index, open_index
from agentfactory.worlds.search.retrieval_client import RetrievalClient

ENGINES = {
    name: f"agentfactory.worlds.search.engines.{name}:{name.title()}"
    for name in ("brave", "searxng", "serper", "tavily", "wikipedia")
}
"""Name of an online engine -> `package.module:CLASS` of its Engine, loaded on first use."""
_REMEMBERED = 10_000
"""Searches whose results a process keeps: chains of a group often repeat each other's."""


class IndexSource:
    """A local index as a Source, searched in one thread per processor."""

    def __init__(self, index: Index) -> None:
        self._index = index
        # more threads than processors would only slow each search
        self._threads = ThreadPoolExecutor(os.cpu_count(), "search")

    async def search(self, query: str, count: int) -> list[Passage]:
        """See Source."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._search, query, count)

    async def open(self, id: str) -> str | None:
        """Return None: passages of an index are already whole."""
        return None

    async def close(self) -> None:
        """Stop the threads after their current searches."""
        self._threads.shutdown(wait=False)

    def _search(self, query: str, count: int) -> list[Passage]:
        try:
            return self._index.search(query, count)
        except BaseException as error:  # boundary: tantivy panics on a damaged file, and a panic is no Exception
            raise ToolInfrastructureError(f"the index cannot be searched: {type(error).__name__}: {error}") from error


class SharedSource:
    """A source and a cache of its last searches, shared by all users with the same `key`."""

    def __init__(self, key: Hashable, source: Source) -> None:
        self.key = key
        self.source = source
        self._found: OrderedDict[tuple[str, int], asyncio.Task[list[Passage]]] = OrderedDict()
        self._searches = self._remembered = 0

    async def search(self, query: str, count: int) -> list[Passage]:
        """See Source. Equal searches share one request or its cached result; failures are not cached."""
        asked = (query, count)
        self._searches += 1
        if asked in self._found:
            self._remembered += 1
            self._found.move_to_end(asked)
        else:
            # a separate task, because a cancelled chain must not cancel the search that others await
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
        """Cancel running searches and close the source."""
        searches = list(self._found.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        await self.source.close()

    def gauges(self) -> dict[str, float]:
        """Return counts since the start: searches, searches answered from memory, and an online engine's own counts."""
        counts = {"searches": float(self._searches), "remembered": float(self._remembered)}
        return counts | (self.source.gauges() if isinstance(self.source, Engine) else {})


_shared: Shared[SharedSource] = Shared()


def acquire(name: str, ranking: str | None = None, engine: EngineOptions | None = None) -> SharedSource:
    """Return the source of this name, opening it on first use; call `release` after use.

    Args:
        name: The folder of an index, the address of a retrieval server, or one of ENGINES.
        ranking: See `open_index`.
        engine: Options of an online engine.

    Raises:
        SettingError: the source does not exist, lacks this ranking, or is not an online engine but `engine` is set.
    """
    key = (name, ranking, engine)
    return _shared.acquire(key, lambda: SharedSource(key, _open(name, ranking, engine)))


async def release(shared: SharedSource) -> None:
    """Release a source; the last release closes it."""
    if _shared.release(shared.key) is not None:
        await shared.close()


def _open(name: str, ranking: str | None, engine: EngineOptions | None) -> Source:
    is_address = name.startswith(("http://", "https://"))
    if engine is not None and name not in ENGINES:
        raise SettingError("engine", f"source is {short(name)}, which is not an online engine", "remove it")
    if ranking is not None and (is_address or name in ENGINES):
        raise SettingError("ranking", f"got {ranking!r}, but only a local index has rankings", "remove it")
    if is_address:
        return RetrievalClient(name)
    if name in ENGINES:
        return load_object(name, Path(), ENGINES)(engine)
    folder = Path(name).expanduser()
    if not folder.is_dir() and "/" not in name:
        fix = f"name the folder of an index, the address of a retrieval server, or an engine ({', '.join(ENGINES)})"
        raise SettingError("source", f"there is no {name!r}", fix)
    return IndexSource(open_index(folder, ranking))
