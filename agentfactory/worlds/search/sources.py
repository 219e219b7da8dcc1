"""Search sources by their names in a recipe. Each is opened once per process and shared by its chains."""

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentfactory.base.errors import SettingError, short
from agentfactory.base.http.clients import AnswerError, answer_within, open_session
from agentfactory.base.http.loopback import is_http_address
from agentfactory.base.http.proxies import proxy_for, through
from agentfactory.base.http.retries import Retries, seconds_asked
from agentfactory.base.http.server_keys import key_header, pinned
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.search.engine import Engine, EngineOptions
from agentfactory.worlds.search.passage import Passage, Source, encodable
from agentfactory.worlds.search.ranking import Index, open_index
from agentfactory.worlds.shared import Shared

_HEALS = frozenset({408, 429, 500, 502, 503, 504})
"""Temporary error statuses, such as those of a full or starting server."""
_ANSWER_BYTES = 64 << 20
_REQUEST_SECONDS, _RETRY_SECONDS = 20.0, 20.0
"""Timeout of one attempt, and the time for retries before a search fails. Together they stay below a call's
`timeout_seconds`, 60, so that a hanging server is an infrastructure failure, not a timeout of the call."""


class RetrievalClient:
    """A Source behind `POST /retrieve` (Search-R1, Jin et al., 2025, arXiv:2503.09516): `{"queries": [...], "topk": 3,
    "return_scores": true}` is answered by `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`. As in
    Search-R1's own servers, items may lack the score, or be bare documents, and documents may lack the id. The protocol
    cannot open a document: its passages are whole. `url`: the server's address; without a path, `/retrieve` is
    appended. `request_seconds`: timeout of one attempt. `retry_seconds`: seconds of retries before a search fails.
    Raises SettingError if the address has no host, or the environment has an invalid proxy for it."""

    def __init__(
        self, url: str, request_seconds: float = _REQUEST_SECONDS, retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        if not is_http_address(url):
            raise SettingError("source", f"{url!r} is not an address", "write it as http://127.0.0.1:8000/retrieve")
        self.url = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/retrieve"
        self._proxy = proxy_for(self.url)
        self._request_seconds, self._retry_seconds = request_seconds, retry_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, query: str, count: int) -> list[Passage]:
        """A query without any letter or digit finds nothing."""
        if count < 1 or not any(map(str.isalnum, query)):
            return []
        return (await self.retrieve([query], count))[0]

    async def retrieve(self, queries: Sequence[str], count: int) -> list[list[Passage]]:
        """Return at most `count` passages for each query, best first. Raises ToolInfrastructureError."""
        request = {"queries": [encodable(query) for query in queries], "topk": count, "return_scores": True}
        answer = await self._ask(json.dumps(request).encode())
        try:
            found = json.loads(answer)["result"]
            if len(found) != len(queries):
                raise ValueError(f"{len(found)} results for {len(queries)} queries")
            return [[_passage(item) for item in items[:count]] for items in found]
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ToolInfrastructureError(
                f"the retrieval server {self.url} answered with no passages ({told}): {answer[:300]}"
            ) from None

    async def open(self, id: str) -> str | None:
        return None

    async def close(self) -> None:
        if self._loop is not None:
            self._loop = None
            await self._session.close()

    async def _ask(self, body: bytes) -> str:
        retries = Retries(self._retry_seconds)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a notebook runs several event loops in succession
            self._session = open_session(
                self._proxy,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self._request_seconds),
            )
            self._loop = loop
        while True:
            asked = 0.0
            try:
                url = pinned(self.url)
                async with self._session.post(
                    url, data=body, headers=key_header(url), allow_redirects=False
                ) as response:
                    text = (await answer_within(response, _ANSWER_BYTES)).decode("utf-8", "replace")
                    if response.status == 200:
                        return text
                    problem = f"status {response.status}: {text[:300]}"
                    if response.status not in _HEALS:
                        raise ToolInfrastructureError(
                            f"the retrieval server {self.url} refuses: {problem}{through(self._proxy)}"
                        )
                    asked = seconds_asked(response.headers.get("Retry-After", ""))
            except AnswerError as error:
                raise ToolInfrastructureError(f"the retrieval server {self.url}: {error}") from None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = str(error) or repr(error)
            delay = retries.delay(loop.time(), asked=asked)
            if delay is None:
                problem += through(self._proxy)
                raise ToolInfrastructureError(f"the retrieval server {self.url} does not answer: {problem}")
            await asyncio.sleep(delay)


def _passage(item: dict[str, Any]) -> Passage:
    """Read `{"document": ..., "score": ...}`, the same without a score, or a bare document."""
    bare = "document" not in item
    document: dict[str, Any] = item if bare else item["document"]
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents is a {type(contents).__name__}")
    id, score, url = document.get("id"), item.get("score"), document.get("url")
    return Passage(
        "" if id is None else encodable(str(id)),
        encodable(contents),
        None if score is None else float(score),
        url if isinstance(url, str) else None,
    )


ENGINES = {
    name: f"agentfactory.worlds.search.known_engines:{name.title()}"
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
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._search, query, count)

    async def open(self, id: str) -> str | None:
        """Return None: passages of an index are already whole."""
        return None

    async def close(self) -> None:
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
        """Equal searches share one request or its cached result; failures are not cached."""
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
        return await self.source.open(id)

    async def close(self) -> None:
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
    """Return the source of this name, opening it on first use; call `release` after use. `name`: the folder of an
    index, the address of a retrieval server, or one of ENGINES. `ranking`: see `open_index`. `engine`: options of an
    online engine. Raises SettingError if the source does not exist, or does not take `ranking` or `engine`."""
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
