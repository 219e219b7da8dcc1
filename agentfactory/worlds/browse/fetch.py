"""`Fetcher`: fetches pages of the public internet for a model, within limits."""

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from agentfactory.base.http.clients import content_of
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.browse.addresses import AllowedHosts, CheckedResolver, parse_address
from agentfactory.worlds.browse.documents import Document, PageError

if TYPE_CHECKING:
    from protego import Protego

AGENT = "AgentFactory"
"""Our user agent in a robots.txt."""
_HEADERS = {
    "User-Agent": f"{AGENT}/0.2 (agent of a language model; obeys robots.txt)",
    "Accept": "text/html,application/xhtml+xml,text/plain,application/pdf;q=0.8,*/*;q=0.5",
    "Accept-Language": "en,*;q=0.5",
    # only encodings whose decompression is bounded on every installation
    "Accept-Encoding": "gzip, deflate",
}
_READABLE = ("application/xhtml+xml", "application/xml", "application/json", "application/pdf")
_MOST_REDIRECTS = 5
_CONNECT_SECONDS = 10.0
_CONNECTIONS, _TO_ONE_HOST, _TO_OWN_HOSTS = 64, 8, 512
_ROBOTS_BYTES = 500 << 10
"""Maximum bytes read of a robots.txt, as RFC 9309, section 2.5, requires."""
_ROBOTS_SECONDS, _ROBOTS_DOWN_SECONDS = 3600.0, 60.0
"""Lifetime of a site's cached rules, and of a cached failure to get them."""
_ROBOTS_KEPT = 1000


class Fetcher:
    """An HTTP client for documents. One object serves all chains of an event loop. Every address, including each
    redirect's, is checked after name resolution, and the connection goes to the checked address. Cookies, environment
    proxies and passwords are not used. `allow_hosts`: hosts in private networks that may be fetched: HOST, or
    HOST:PORT; their failures are infrastructure failures, not the model's. `robots`: whether to obey a site's
    robots.txt. `seconds`: timeout of one document, including redirects and robots.txt. `max_bytes`: maximum size of a
    document after decompression. `resolver`: resolver of host names; None: the system's."""

    def __init__(
        self,
        allow_hosts: tuple[str, ...] = (),
        robots: bool = True,
        seconds: float = 20.0,
        max_bytes: int = 5 << 20,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._allowed = AllowedHosts(allow_hosts)
        self._obeys = robots
        self._seconds = seconds
        self._most = max_bytes
        self._rules: OrderedDict[URL, tuple[float, Protego | str]] = OrderedDict()
        self._asking: dict[URL, asyncio.Lock] = {}
        self._resolver = resolver
        self._opened: dict[bool, aiohttp.ClientSession] = {}

    async def fetch(self, address: str) -> Document:
        """Return the document at `address`. Raises PageError (the model cannot or must not read it; the message tells
        the model why), ToolInfrastructureError (name resolution fails, or a host in `allow_hosts` does not answer)."""
        url = parse_address(address, self._allowed)
        try:
            async with asyncio.timeout(self._seconds):
                for _ in range(_MOST_REDIRECTS + 1):
                    if self._obeys:
                        await self._ask_robots(url)
                    async with self._session(url).get(url, allow_redirects=False) as response:
                        following = self._redirect(response)
                        if following is None:
                            return await self._read(url, response)
                    url = following
        except TimeoutError:
            raise self._down(url, f"did not answer within {self._seconds:g} s") from None
        except aiohttp.ClientConnectorSSLError as error:
            if "WRONG_VERSION_NUMBER" not in str(error):
                raise self._down(url, f"does not answer ({_reason(error)})") from error
            raise PageError(f"{url.host}:{url.port} does not speak https; open it with http://.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(url, f"does not answer ({_reason(error)})") from error
        raise PageError(f"{address} leads through more than {_MOST_REDIRECTS} redirects.")

    async def close(self) -> None:
        for session in self._opened.values():
            await session.close()

    def _session(self, url: URL) -> aiohttp.ClientSession:
        # a session belongs to the event loop that was running when it was created
        own = self._is_own(url)
        if own not in self._opened:
            resolver = CheckedResolver(self._allowed, self._resolver)
            # the recipe's own hosts serve all chains concurrently: a chain that waited for others would time out
            most, to_one_host = (_TO_OWN_HOSTS, 0) if own else (_CONNECTIONS, _TO_ONE_HOST)
            self._opened[own] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, limit=most, limit_per_host=to_one_host),
                headers=_HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                trust_env=False,
            )
        return self._opened[own]

    def _redirect(self, response: aiohttp.ClientResponse) -> URL | None:
        location = response.headers.get("Location")
        if response.status not in (301, 302, 303, 307, 308) or location is None:
            return None
        try:
            target = response.url.join(URL(location))
        except ValueError:
            raise PageError(f"{response.url} redirects to something that is no address.") from None
        return parse_address(str(target), self._allowed)

    async def _read(self, url: URL, response: aiohttp.ClientResponse) -> Document:
        status = response.status
        if status == 429 or status >= 500:
            raise self._down(url, f"cannot serve it now ({status})")
        if status in (404, 410):
            raise PageError(f"There is no page {url} ({status}).")
        if status in (401, 402, 403, 451):
            raise PageError(f"{url.host} does not give access to {url} ({status}).")
        if not 200 <= status < 300:
            raise PageError(f"{url.host} answered with status {status} for {url}.")
        kind = response.content_type if "Content-Type" in response.headers else "text/html"
        if not kind.startswith("text/") and kind not in _READABLE:
            raise PageError(f"{url} is of the type {kind}; only text, HTML and PDF can be read.")
        content = await content_of(response, self._most)
        if content is None:
            raise PageError(f"{url} is larger than {self._most >> 10:,} KiB, the most that is read.")
        return Document(str(url), kind, response.charset, content)

    async def _ask_robots(self, url: URL) -> None:
        """Raise PageError if the site's robots.txt disallows `url`."""
        origin = url.origin()
        async with self._asking.setdefault(origin, asyncio.Lock()):
            known = self._rules.get(origin)
            if known is None or known[0] < time.monotonic():
                rules = await self._robots(origin)
                seconds = _ROBOTS_DOWN_SECONDS if isinstance(rules, str) else _ROBOTS_SECONDS
                known = self._rules[origin] = (time.monotonic() + seconds, rules)
            self._rules.move_to_end(origin)
        if len(self._rules) > _ROBOTS_KEPT:
            oldest, _ = self._rules.popitem(last=False)
            self._asking.pop(oldest, None)
        rules = known[1]
        if isinstance(rules, str):
            raise self._down(url, rules)
        if not rules.can_fetch(str(url), AGENT):
            raise PageError(f"{url.host} does not want {url} to be opened by programs (robots.txt).")

    async def _robots(self, origin: URL) -> "Protego | str":
        """Return a site's robots.txt rules (RFC 9309, section 2.3.1)."""
        # searches import this module, too, and must not need the extra
        from protego import Protego

        url = origin / "robots.txt"
        for _ in range(_MOST_REDIRECTS + 1):
            async with self._session(url).get(url, allow_redirects=False) as response:
                following = self._redirect(response)
                if following is None:
                    if response.status == 429 or response.status >= 500:
                        return f"cannot serve its robots.txt now ({response.status})"
                    if response.status != 200:
                        return Protego.parse("")
                    content = await content_of(response, _ROBOTS_BYTES, cut=True)
                    return Protego.parse((content or b"").decode("utf-8-sig", "replace"))
            url = following
        return Protego.parse("")

    def _is_own(self, url: URL) -> bool:
        return self._allowed.include(url.raw_host or "", url.port or 0)

    def _down(self, url: URL, told: str) -> Exception:
        if self._is_own(url):
            return ToolInfrastructureError(f"{url.host}:{url.port}, which allow_hosts names, {told}")
        return PageError(f"{url.host} {told}.")


def _reason(error: Exception) -> str:
    reason = getattr(error, "os_error", error)
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
