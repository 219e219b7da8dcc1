"""`Engine`: the base of online engines, with requests, result pages, retries, rate limit, cache and budget."""

import asyncio
import html
import json
import logging
import os
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from agentfactory.base.errors import SettingError, short
from agentfactory.base.http.clients import AnswerError, answer_within, open_session
from agentfactory.base.http.proxies import Proxy, proxy_for, through
from agentfactory.base.http.retries import Retries, seconds_asked
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.environment import VARIABLE, is_named
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.extension import check_types
from agentfactory.tools.calls.limits import Rates
from agentfactory.worlds.browse.answer_cache import DiskCache
from agentfactory.worlds.browse.database import Database
from agentfactory.worlds.browse.documents import PageError
from agentfactory.worlds.browse.web_pages import Pages
from agentfactory.worlds.search.passage import Passage, encodable

logger = logging.getLogger(__name__)

_TABLES = "CREATE TABLE IF NOT EXISTS spending (name TEXT PRIMARY KEY, calls INTEGER, cost REAL)"


class BudgetUsedUp(ToolInfrastructureError):
    """The budget allows no further call. The model did not cause this, so its chain is not scored."""


@dataclass(frozen=True)
class Spending:
    """The amounts spent: `calls`, and `cost` in dollars."""

    calls: int
    cost: float


class Budget:
    """A persistent count of calls to an engine, shared by all processes and kept across resumed runs, in the file
    `spending.sqlite` of `folder`. Remove the file to reset the count. `name`: name of the engine. `calls`: maximum
    number of calls; None: no limit. `cost`: maximum cost in dollars; None: no limit. `price`: dollars per call."""

    def __init__(
        self, folder: Path, name: str, calls: int | None = None, cost: float | None = None, price: float = 0.0
    ) -> None:
        self._database = Database(folder / "spending.sqlite", _TABLES)
        self._name, self._calls, self._cost, self._price = name, calls, cost, price

    def spend(self) -> None:
        """Count a call before it is made. Raises BudgetUsedUp if it would exceed the budget."""
        with self._database.transaction() as connection:
            spent = self._read(connection)
            calls, cost = spent.calls + 1, spent.cost + self._price
            if reached := self._reached(calls, cost):
                told = f"{self._name}: the budget of {reached} is used up ({self._database.path})"
                notify(logger, f"budget of {self._name}", f"{told}; fix: raise the search's budget")
                raise BudgetUsedUp(told)
            connection.execute("INSERT OR REPLACE INTO spending VALUES (?, ?, ?)", (self._name, calls, cost))

    def spent(self) -> Spending:
        with self._database.reading() as connection:
            return self._read(connection)

    def close(self) -> None:
        self._database.close()

    def _read(self, connection: sqlite3.Connection) -> Spending:
        row = connection.execute("SELECT calls, cost FROM spending WHERE name = ?", (self._name,)).fetchone()
        return Spending(*row) if row else Spending(0, 0.0)

    def _reached(self, calls: int, cost: float) -> str:
        if self._calls is not None and calls > self._calls:
            return f"{self._calls:,} calls"
        # costs are summed as floats: 3 x 0.1 must not exceed 0.3
        if self._cost is not None and cost > self._cost * (1 + 1e-9):
            return f"{self._cost:g} dollars"
        return ""


_ANSWER_SECONDS = 15.0
_MOST_WAIT_SECONDS = 40.0
"""Maximum wait for the rate limit. With the time for an answer it stays below a call's `timeout_seconds`, 60."""
_ANSWER_BYTES = 8 << 20
_MOST_PAGES = 10
_TAGS = re.compile(r"</?[A-Za-z][^<>]*>")


@dataclass(frozen=True)
class Request:
    """A request for one page of results. `url` never contains a key: keys go into `headers`."""

    url: str
    query: Mapping[str, str | int] = field(default_factory=dict)
    body: Any = None
    """JSON body of a POST; None: GET."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """One page of results; `more` is True if the engine has a further page."""

    passages: list[Passage]
    more: bool


@dataclass(frozen=True)
class EngineOptions:
    """Options of an online engine. `cache`: folder of the answer cache, shared by all chains, workers and steps; None:
    no cache. `calls`, `cost`: maximum number of requests, and cost in dollars, counted in `cache` over all processes
    and resumed runs; None: no limit. `price`: dollars per request. `calls_per_second`: rate limit of one process; None:
    that which the engine allows every customer. `retry_seconds`: seconds for which a failing request is retried."""

    cache: Path | None = None
    calls: int | None = None
    cost: float | None = None
    price: float = 0.0
    calls_per_second: float | None = None
    retry_seconds: float = 30.0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "EngineOptions":
        """Parse the options from the recipe's mapping, in which `cache` is a string. Raises SettingError."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise SettingError(f"engine.{unknown[0]}", "there is no such option", f"use one of {', '.join(known)}")
        check_types(given, cls, "engine")
        try:
            cache = given.get("cache")
            return cls(**{**given, "cache": None if cache is None else Path(cache).expanduser().resolve()})
        except SettingError as error:
            raise error.at(f"engine.{error.field}") from None

    def __post_init__(self) -> None:
        for name in ("calls", "cost", "calls_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(name, f"got {short(value)}; it has to be a number above 0")
        if self.cache is None and (self.calls is not None or self.cost is not None):
            raise SettingError("cache", "the budget needs a folder for its count, and there is none", "name a folder")
        if self.cost is not None and not self.price > 0:
            raise SettingError("price", f"got {self.price}, but cost has a limit", "give the dollars per request")


class Engine(ABC):
    """An online engine as a Source. A subclass builds the requests and parses the answers. Class attributes: `name`;
    `address`, the URL of requests; `key`, the environment variable with the API key ("": no key needed); `page_size`,
    the maximum results per request; `per_second`, the rate that the engine allows every customer; `query_characters`,
    the maximum length of a query. Raises SettingError if the variable is not set."""

    name: ClassVar[str]
    address: ClassVar[str]
    key: ClassVar[str] = ""
    page_size: ClassVar[int]
    per_second: ClassVar[float]
    query_characters: ClassVar[int]

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self._secret = variable(self.name, self.key) if self.key else ""
        folder = self.options.cache
        self._cache = None if folder is None else DiskCache(folder)
        self._budget: Budget | None = None
        if folder is not None and (self.options.calls is not None or self.options.cost is not None):
            self._budget = Budget(folder, self.name, self.options.calls, self.options.cost, self.options.price)
        self._rates = Rates({self.name: self.options.calls_per_second or self.per_second})
        self._pages = Pages(cache=folder)
        self._session: aiohttp.ClientSession | None = None
        self._proxy: Proxy | None = None
        self._requests = 0

    @abstractmethod
    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """Return the request for page `page`, from 0, with `count` results per page."""

    @abstractmethod
    def read(self, answer: Any) -> Results:
        """Parse the results in an answer. May raise LookupError, TypeError, ValueError or AttributeError."""

    async def search(self, query: str, count: int) -> list[Passage]:
        """A passage's `id` and `url` are both the address of its page."""
        query = " ".join(query.split())[: self.query_characters].strip()
        query = "".join(character for character in query if character.isprintable())
        found: dict[str, Passage] = {}
        size = min(count, self.page_size)
        for page in range(_MOST_PAGES if query else 0):
            results = await self._results(query, size, page)
            new = [passage for passage in results.passages if passage.id not in found]
            found |= {passage.id: passage for passage in new}
            if len(found) >= count or not results.more or not new:
                break
        return list(found.values())[:count]

    async def open(self, id: str) -> str | None:
        """Returns the page at the address `id`."""
        try:
            page = await self._pages.open(id)
        except PageError:
            return None
        return f"{page.text.title or page.url}\n{page.text.text}"

    def gauges(self) -> dict[str, float]:
        """Return counts since the start: requests sent, and the cache's hits and misses."""
        counts = {"requests": float(self._requests)}
        if self._cache is not None:
            counts |= {"cache_hits": float(self._cache.hits), "cache_misses": float(self._cache.misses)}
        return counts

    async def close(self) -> None:
        if self._cache is not None:
            await self._cache.close()
        if self._budget is not None:
            self._budget.close()
        if self._session is not None:
            await self._session.close()
        await self._pages.close()

    async def _results(self, query: str, size: int, page: int) -> Results:
        async def ask() -> dict[str, Any]:
            return asdict(self._read(await self._ask(query, size, page)))

        if self._cache is None:
            kept = await ask()
        else:
            kept = await self._cache.get(["search", 1, self.request(query, size, page, "").url, query, size, page], ask)
        return Results([Passage(**passage) for passage in kept["passages"]], kept["more"])

    def _read(self, answer: Any) -> Results:
        try:
            return self.read(answer)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ToolInfrastructureError(f"{self.name}: its answer has an unexpected format: {error!r}") from None

    async def _ask(self, query: str, size: int, page: int) -> Any:
        """Return an answer's JSON. Retries requests whose failure may be temporary."""
        request = self.request(query, size, page, self._secret)
        retries = Retries(self.options.retry_seconds)
        while True:
            await self._wait()
            if self._budget is not None:
                await run_in_thread(self._budget.spend)
            self._requests += 1
            asked = 0.0
            try:
                async with self._send(request) as response:
                    if response.status == 200:
                        return json.loads(await answer_within(response, _ANSWER_BYTES))
                    self._check(response.status)
                    told = f"it answered with status {response.status}"
                    asked = seconds_asked(response.headers.get("Retry-After", ""))
            except TimeoutError:
                told = f"no answer within {_ANSWER_SECONDS:g} s"
            except AnswerError as error:
                told = str(error)
            except (aiohttp.ClientError, OSError) as error:
                told = f"no answer ({type(error).__name__}{through(self._proxy)})"
            except (ValueError, RecursionError):  # JSON, or its charset
                told = "its answer is not JSON"
            delay = retries.delay(time.monotonic(), asked=asked)
            if delay is None:
                raise ToolInfrastructureError(f"{self.name}: {told}, for {self.options.retry_seconds:g} s")
            await asyncio.sleep(delay)

    async def _wait(self) -> None:
        """Wait until the rate limit allows a request. Raises ToolInfrastructureError if that takes too long."""
        now = time.monotonic()
        if (seconds := self._rates.wait(self.name, now)) > _MOST_WAIT_SECONDS:
            rate = self.options.calls_per_second or self.per_second
            told = f"{self.name}: at {rate:g} requests per second, a search would wait for {seconds:.0f} s"
            fix = "raise engine.calls_per_second if your plan allows it, name a cache, or lower rollout.concurrency"
            notify(logger, f"rate of {self.name}", f"{told}; fix: {fix}")
            raise ToolInfrastructureError(told)
        await asyncio.sleep(self._rates.take(self.name, now))

    def _send(self, request: Request) -> Any:
        if self._session is None:
            # without TLS, a proxy could read the key
            proxy = proxy_for(request.url)
            self._proxy = None if self._secret and request.url.startswith("http:") else proxy
            self._session = open_session(
                self._proxy,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS),
                headers={"User-Agent": "AgentFactory/0.2 (search for agents)", "Accept": "application/json"},
            )
        query = {name: str(value) for name, value in request.query.items()}
        method = "GET" if request.body is None else "POST"
        # a redirect would leak the key
        return self._session.request(
            method, request.url, params=query, json=request.body, headers=request.headers, allow_redirects=False
        )

    def _check(self, status: int) -> None:
        """Raise ToolInfrastructureError for a permanent status, without the response body, which may have the key."""
        if status == 429 or status >= 500:
            return
        told = f"{self.name}: it refused a request with status {status}"
        if self.key:
            told += f"; fix: export {self.key} with a valid key that has credit left"
            notify(logger, f"refusals of {self.name}", told)
        raise ToolInfrastructureError(told)


def variable(engine: str, name: str) -> str:
    """Return an engine's environment variable. Raises SettingError if it is not set, or not named in the recipe."""
    value = os.environ.get(name, "").strip()
    # without a recipe, none names it
    if value and (VARIABLE not in os.environ or is_named(name)):
        return value
    reason = "the recipe does not name" if value else "is not set"
    fix = f"{'' if value else f'export {name}, and '}name it in the recipe: env: [{name}]"
    raise SettingError("source", f"{engine} needs the environment variable {name}, which {reason}", fix)


def passage(url: str, title: Any, text: Any, score: Any = None) -> Passage:
    """Convert a result into a passage without markup. Raises TypeError if title or text are not strings."""
    if not isinstance(url, str) or not url:
        raise TypeError(f"a result whose address is {url!r}")
    for part in (title, text):
        if not isinstance(part, str | None):
            raise TypeError(f"a result that contains {type(part).__name__} instead of text")
    url = encodable(url)
    contents = encodable(f'"{_plain(title or url)}"\n{_plain(text or "")}')
    return Passage(url, contents, None if score is None else float(score), url)


def _plain(text: str) -> str:
    return " ".join(html.unescape(_TAGS.sub("", text)).split())
