"""`Pages`: web pages as text, from the network or a cache."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.killable import KillableProcesses
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.tools.sandbox.program import start_confined
from agentfactory.worlds.browse.addresses import AllowedHosts, parse_address
from agentfactory.worlds.browse.answer_cache import DiskCache
from agentfactory.worlds.browse.documents import Document, PageError, Text
from agentfactory.worlds.browse.fetch import Fetcher

_PROCESSES = 2


class Reader:
    """A converter of documents to text for all chains of a process, in subprocesses; `seconds` per document."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._processes = KillableProcesses("agentfactory.worlds.browse.read_process", _PROCESSES, start=start_confined)

    async def read(self, document: Document) -> Text:
        """Convert a document to text. Raises PageError (it cannot be read, or takes too long; the message is shown to
        the model), ToolInfrastructureError (no subprocess could be started)."""
        return await run_in_thread(lambda: self._read(document))

    def close(self) -> None:
        """End the idle subprocesses; the next document starts new ones."""
        self._processes.close()

    def _read(self, document: Document) -> Text:
        request: dict[str, Any] = {"url": document.url, "type": document.type, "charset": document.charset}
        request |= {"bytes": len(document.content), "seconds": self._seconds}
        try:
            with self._processes.borrowed() as process:
                process.send(request, document.content)
                answer = process.receive()
                process.answered = answer is not None
        except ChildProcessError as error:
            raise ToolInfrastructureError(str(error)) from error
        if answer is None:
            raise PageError(f"{document.url} takes too much time or memory to be read.")
        if "error" in answer:
            raise PageError(answer["error"])
        return Text(answer["title"], answer["text"], tuple(answer["links"]))


@dataclass(frozen=True)
class WebPage:
    """A page as text; `url` is its address after redirects."""

    url: str
    text: Text


class Pages:
    """A source of web pages as text. One object serves all chains of a process. `allow_hosts`: see Fetcher. `robots`:
    see Fetcher. `cache`: folder of the page cache, with a lifetime of a month; None: no cache."""

    def __init__(self, allow_hosts: tuple[str, ...] = (), robots: bool = True, cache: Path | None = None) -> None:
        self._allowed = AllowedHosts(allow_hosts)
        self._fetcher = Fetcher(allow_hosts, robots)
        self._reader = Reader()
        self._cache = None if cache is None else DiskCache(cache)
        # part of the cache key: a recipe must not find pages that only another recipe may fetch
        self._settings = ["page", 1, sorted(allow_hosts), robots]

    async def open(self, address: str) -> WebPage:
        """Return the page at `address`. Raises PageError (it cannot be read; the message is shown to the model),
        ToolInfrastructureError (the network, the cache or a host in `allow_hosts` fails)."""
        url = str(parse_address(address, self._allowed))
        if self._cache is None:
            return await self._load(url)

        async def load() -> dict[str, object]:
            return asdict(await self._load(url))

        kept = await self._cache.get([*self._settings, url], load)
        text = kept["text"]
        return WebPage(kept["url"], Text(text["title"], text["text"], tuple(text["links"])))

    def gauges(self) -> dict[str, float]:
        if self._cache is None:
            return {}
        return {"cache_hits": float(self._cache.hits), "cache_misses": float(self._cache.misses)}

    async def close(self) -> None:
        if self._cache is not None:
            await self._cache.close()
        await self._fetcher.close()
        self._reader.close()

    async def _load(self, url: str) -> WebPage:
        document = await self._fetcher.fetch(url)
        return WebPage(document.url, await self._reader.read(document))
