"""Routing of requests to server replicas, and recovery of servers that are lost or have lost their weights."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from agentfactory.base.http.retries import Retries
from agentfactory.rollout.inference.http_transport import Connection, LostError, ServerUnreachableError
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.token_row import Span
from agentfactory.tools.images.lru_cache import ByteCache

REMEMBERED = 1 << 15
"""Number of chains, and of prompts, whose replica is remembered. Forgetting one costs a prefill."""


class ServerState(StrEnum):
    """The state of a server; only SERVING ones get requests."""

    SERVING = "serving"
    DOWN = "down"
    """Nothing answers at its address."""
    UNPROVEN = "unproven"
    """The server answers, but has not yet proven that it has the current weights."""


class Replica(NamedTuple):
    """One copy of the model, with its own KV cache: the address of its server, and its data parallel rank among the
    replicas there; None for a single replica."""

    url: str
    rank: int | None = None


class Router:
    """A router that chooses replicas by prefix cache and load: a pure state machine, without a clock or I/O. A chain's
    turns go to the replica that has its prefix cached, a new chain to one that has its prompt cached, unless its load
    is far higher, and everything else to the replica with the fewest requests, then the fewest assigned chains, since
    chains may spend most of their time in tools."""

    def __init__(self, urls: Collection[str]):
        self.states = dict.fromkeys(urls, ServerState.SERVING)
        self.load: Counter[Replica] = Counter()
        """Requests under way."""
        self.silent_since: float | None = None
        """Time since which no server has answered; None while one does."""
        self.last_success: float | None = None
        """Time at which a server last completed a request."""
        self.moved = 0
        """How often a chain went on at another replica, where its context was computed again."""
        self._replicas = {url: [Replica(url)] for url in urls}
        self._given: Counter[Replica] = Counter()
        self._chains: ByteCache[str, Replica] = ByteCache(REMEMBERED)
        self._prompts: ByteCache[int, set[Replica]] = ByteCache(REMEMBERED)

    def has_replicas(self, url: str, count: int) -> None:
        self._replicas[url] = [Replica(url, rank) for rank in range(count)] if count > 1 else [Replica(url)]

    def replicas(self, url: str) -> list[Replica]:
        return self._replicas[url]

    def assign(self, chain: str, home: Replica) -> None:
        """Send the next turns of `chain` to `home`, while it serves."""
        self.moved += self._chains.get(chain) not in (None, home)
        self._chains.put(chain, home)

    def choose(self, chain: str, prompt: Sequence[Hashable], avoid: Collection[str] = ()) -> Replica | None:
        """Return the replica for a turn of `chain` with the tokens `prompt`; None while no server serves. Servers in
        `avoid` are used only if no other serves."""
        urls = [url for url, state in self.states.items() if state is ServerState.SERVING]
        urls = [url for url in urls if url not in avoid] or urls
        serving = [replica for url in urls for replica in self._replicas[url]]
        if not serving:
            return None
        home = self._chains.get(chain)
        if home not in serving:
            self.moved += home is not None
            home = self._choose_for_prompt(prompt, serving) if len(serving) > 1 else serving[0]
            self._given[home] += 1
        self._chains.put(chain, home)
        return home

    def _choose_for_prompt(self, prompt: Sequence[Hashable], serving: list[Replica]) -> Replica:
        key = hash(tuple(prompt))
        homes = self._prompts.get(key) or set()
        chosen = min(serving, key=lambda replica: (self.load[replica], self._given[replica]))
        if at_home := [replica for replica in serving if replica in homes]:
            home = min(at_home, key=lambda replica: self.load[replica])
            if self.load[home] <= 2 * self.load[chosen] + 8:
                chosen = home
        self._prompts.put(key, homes | {chosen})
        return chosen

    def lost(self, url: str, now: float) -> None:
        """Note that the connection to `url` failed. The server gets no requests until it has proven its weights."""
        self.states[url] = ServerState.DOWN
        if self.silent_since is None and set(self.states.values()) == {ServerState.DOWN}:
            self.silent_since = now

    def answers(self, url: str, state: ServerState) -> None:
        """Note that `url` answers, and whether it has the current weights."""
        self.states[url] = state
        self.silent_since = None


class PrefixTokens:
    """A count of the prompt tokens that servers must compute if they keep every prefix: each token of a context once
    for each version of the weights, and a prompt that several chains begin with once."""

    def __init__(self) -> None:
        self.sent = self.once = 0
        """Tokens of all prompts, and those that are computed for the first time."""
        self._known: ByteCache[Hashable, tuple[Hashable, int]] = ByteCache(2 * REMEMBERED)
        """Chain, or first prompt -> version of the weights, tokens of its last context."""

    def note(self, chain: str, prompt: Sequence[Hashable], weights: Hashable, sampled: int) -> None:
        """Note a turn of `sampled` tokens after `prompt`."""
        first = None if (own := self._known.get(chain)) else hash(tuple(prompt))
        version, known = own or self._known.get(first) or (None, 0)
        self.sent += len(prompt)
        self.once += max(0, len(prompt) - (known if version == weights else 0))
        if first is not None:
            self._known.put(first, (weights, len(prompt)))
        self._known.put(chain, (weights, len(prompt) + sampled))


logger = logging.getLogger(__name__)


class Recovery:
    """An assigner of requests to servers with the published weights, which recovers the other servers."""

    def __init__(self, connection: Connection, router: Router, retry_seconds: float):
        self.restore: Callable[[str], Awaitable[bool]] | None = None
        """Callback that loads the current weights into a server that lacks them, and returns False if the server has
        gone meanwhile; None if no weights are published."""
        self.base_models: set[str] = set()
        """Names of base weights; any other model is an adapter."""
        self.published: Published | None = None
        """The last published weights; None if there are none. Turns that are requested from now on must come from these
        weights or newer ones; tokens sampled from older ones are discarded."""
        self._connection = connection
        self._router = router
        self._limit = retry_seconds
        self._returning: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._last_words = "it refused the connection"
        self._closed = False

    async def close(self) -> None:
        """Stop waiting for servers. Connections that end from now on no longer count as lost."""
        self._closed = True
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)

    def is_current(self, versions: Sequence[Span], model: str, oldest: Published | None) -> bool:
        """Return whether the base weights of a turn are `oldest` or newer ones of the same run. Always True for turns
        with an adapter, because each version of an adapter has its own name."""
        if oldest is None or model not in self.base_models:
            return True
        return all(_is_at_least(span.version, oldest) for span in versions)

    async def count_replicas(self, url: str) -> None:
        """Query how many replicas answer at `url`. Raises ValueError if the server does not report them."""
        self._router.has_replicas(url, len(await self._connection.loads(url)))

    async def take(self, chain: str, prompt: Sequence[int], avoid: set[str]) -> Replica:
        """Return the replica for a request; wait while no server is serving. Raises ServerUnreachableError if the wait
        exceeds the limit."""
        while True:
            if self._failure is not None:
                raise self._failure
            if (replica := self._router.choose(chain, prompt, avoid)) is not None:
                return replica
            silent = self._router.silent_since
            left = None if silent is None else silent + self._limit - time.monotonic()
            if left is not None and left <= 0:
                raise ServerUnreachableError(
                    f"no server answers at {', '.join(self._router.states)} for {self._limit:g} s: {self._last_words}"
                )
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def held_back(self, url: str) -> bool:
        """Wait while the server is paused or asleep; return whether it was. The caller must not send a turn meanwhile:
        vLLM would queue it, with an adapter that it may lose during sleep."""
        tries = 0
        try:
            while await self._connection.holds_requests(url):
                tries += 1
                await asyncio.sleep(Retries.pause(tries))
        except LostError as error:
            self.lose(url, str(error))
        return tries > 0

    def lose(self, url: str, problem: str) -> None:
        """Note that the connection to `url` failed, and start to bring the server back."""
        self._last_words = problem
        if self._router.states[url] is ServerState.SERVING and not self._closed:
            logger.warning("server %s is lost: %s", url, problem)
            self._router.lost(url, time.monotonic())
            self._bring_back(url)

    def distrust(self, url: str, problem: str) -> None:
        """Note that `url` answers with weights other than the published ones, and start to bring it back."""
        if self._router.states[url] is ServerState.SERVING:
            logger.warning("server %s lost its weights: %s; requesting them", url, problem)
            self._router.answers(url, ServerState.UNPROVEN)
            self._bring_back(url)

    def _bring_back(self, url: str) -> None:
        self._changed.set()
        task = asyncio.create_task(self._return(url))
        self._returning.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self._returning.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # all requests that wait for a server raise it
            self._failure = task.exception()
            self._changed.set()

    async def _return(self, url: str) -> None:
        tries = 0
        while True:
            tries += 1
            try:
                if await self._connection.is_healthy(url):
                    self._router.answers(url, ServerState.UNPROVEN)
                    self._changed.set()
                    with suppress(ValueError):  # the client has reported it
                        await self.count_replicas(url)
                    if await self._has_weights(url) or self.restore is None or await self.restore(url):
                        break
                    self._router.lost(url, time.monotonic())
            except LostError as error:
                self._last_words = str(error)
                self._router.lost(url, time.monotonic())
            await asyncio.sleep(Retries.pause(tries))
        logger.warning("server %s is back", url)
        self._router.answers(url, ServerState.SERVING)
        self._changed.set()

    async def _has_weights(self, url: str) -> bool:
        """Return whether the server's process is still the one that loaded the published weights."""
        if self.published is None:
            return self.restore is None
        if self.published.model not in self.base_models:
            return any(card["id"] == self.published.model for card in await self._connection.models(url))
        return _is_at_least(await self._connection.weight_version(url), self.published)


def _is_at_least(label: str, oldest: Published) -> bool:
    """Return whether the base weights called `label` are `oldest` or a newer version, which a server may use before it
    is published. A label ends with its version; all labels of a run share a prefix."""
    prefix = oldest.label.removesuffix(str(oldest.version))
    number = label.removeprefix(prefix)
    return label.startswith(prefix) and number.isdecimal() and int(number) >= oldest.version
