"""`Pages`: web pages as text, from the network or a cache."""

from dataclasses import asdict, dataclass
from pathlib import Path

from agentfactory.worlds.browse.addresses import AllowedHosts, parse_address
from agentfactory.worlds.browse.answer_cache import DiskCache
from agentfactory.worlds.browse.documents import Text
from agentfactory.worlds.browse.fetch import Fetcher
from agentfactory.worlds.browse.reader import Reader


@dataclass(frozen=True)
class WebPage:
    """A page as text; `url` is its address after redirects."""

    url: str
    text: Text


class Pages:
    """A source of web pages as text. One object serves all chains of a process.

    Args:
        allow_hosts: See Fetcher.
        robots: See Fetcher.
        cache: Folder of the page cache, with a lifetime of a month; None: no cache.
    """

    def __init__(self, allow_hosts: tuple[str, ...] = (), robots: bool = True, cache: Path | None = None) -> None:
        self._allowed = AllowedHosts(allow_hosts)
        self._fetcher = Fetcher(allow_hosts, robots)
        self._reader = Reader()
        self._cache = None if cache is None else DiskCache(cache)
        # part of the cache key: a recipe must not find pages that only another recipe may fetch
        self._settings = ["page", 1, sorted(allow_hosts), robots]

    async def open(self, address: str) -> WebPage:
        """Return the page at `address`.

        Raises:
            PageError: it cannot be read; the message is shown to the model.
            ToolInfrastructureError: the network, the cache or a host in `allow_hosts` fails.
        """
        url = str(parse_address(address, self._allowed))
        if self._cache is None:
            return await self._load(url)

        async def load() -> dict[str, object]:
            return asdict(await self._load(url))

        kept = await self._cache.get([*self._settings, url], load)
        text = kept["text"]
        return WebPage(kept["url"], Text(text["title"], text["text"], tuple(text["links"])))

    def gauges(self) -> dict[str, float]:
        """Return the cache's hits and misses since the start."""
        if self._cache is None:
            return {}
        return {"cache_hits": float(self._cache.hits), "cache_misses": float(self._cache.misses)}

    async def close(self) -> None:
        """Close connections, subprocesses and files."""
        if self._cache is not None:
            await self._cache.close()
        await self._fetcher.close()
        self._reader.close()

    async def _load(self, url: str) -> WebPage:
        document = await self._fetcher.fetch(url)
        return WebPage(document.url, await self._reader.read(document))
