"""The chains of a process that run at a time: they begin, and their turns are sampled, when Admission lets them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING

from agentfactory.base.http.connections import check_open_files, raise_open_files
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.admission import AT_ONCE, Admission, Cache, Chain, State
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.inference.routing import Replica
from agentfactory.rollout.inference.server_metrics import Load

if TYPE_CHECKING:
    from agentfactory.rollout.inference.inference_client import InferenceClient

logger = logging.getLogger(__name__)

SPARE = 8
"""Of so many blocks, one is spare where each holds a whole context, as in the embedded engine."""
READ_SECONDS, RETRY_SECONDS = 10.0, 1.0
"""Interval at which the sizes of the servers' caches are read, while chains begin or wait; after a failure."""


class Place:
    """The place of a chain, which its requests for turns call `chain`, among those of the process."""

    def __init__(self, places: "Places", chain: str):
        self.chain = chain
        self.timer: asyncio.Timeout | None = None
        """The chain's time limit, which stands still while a turn is held."""
        self.note: Callable[[float, float], None] = lambda start, end: None
        """Called with the times of `time.monotonic()` between which a turn was held."""
        self.held_seconds = 0.0
        self.admitted = asyncio.Event()
        self._places = places
        self._holds, self._since = 0, 0.0
        self._until: float | None = None

    @property
    def seat(self) -> Chain:
        return self._places.admission.chains[self]

    @asynccontextmanager
    async def turn(self, ids: Sequence[int]) -> AsyncIterator[None]:
        """Wait until a turn after `ids` may be requested; the request ends with the `with` block."""
        admission, first = self._places.admission, self.seat.state is State.STARTING
        admission.ask(self, len(ids), hash(tuple(ids)) if first else None)
        try:
            if self.seat.state is State.HELD:
                with self._held():
                    await self._places.wait_for(self)
            yield
        finally:
            # the chain may have ended before a request of its agent
            if self in admission.chains:
                admission.answer(self)
                self._places.settle()

    @contextmanager
    def _held(self) -> Iterator[None]:
        start = time.monotonic()
        if not self._holds:
            self._since, self._until = start, self.timer and self.timer.when()
            if self.timer is not None:
                self.timer.reschedule(None)
        self._holds += 1
        try:
            yield
        finally:
            self.note(start, end := time.monotonic())
            self._holds -= 1
            if not self._holds:
                self.held_seconds += (seconds := end - self._since)
                if self.timer is not None and self._until is not None:
                    with suppress(RuntimeError):  # the chain has ended
                        self.timer.reschedule(self._until + seconds)


class Places:
    """The places of a process's chains: `rollout.concurrency` of them, or as many as the caches of `client`'s servers
    hold, of which each of `workers` processes has an equal part. Raise SettingError for too few open files."""

    def __init__(self, recipe: RolloutRecipe, client: "InferenceClient | None" = None):
        follows = recipe.rollout.concurrency == "auto"
        self.workers = 1
        self._client = client if follows else None
        most, self._longest = recipe.most_chains(), recipe.rollout.max_total_tokens
        check_open_files(most)
        self._most_requests = most if follows else inf
        files = raise_open_files()
        at_most = inf if files is None or not follows else files // 2
        # without a report of the caches, as many chains as the servers run requests, or as the recipe says
        self._unknown = Cache(most, self._longest)
        self.admission = Admission({0: self._unknown}, self._longest, self._most_requests, at_most)
        self._computed: tuple[float, ...] | None = None
        self._read = asyncio.Event()
        self._due = 0.0

    def expect(self, longest: int) -> None:
        """Note that chains, of which none has begun, may have as many tokens."""
        self._longest = self.admission.longest = longest
        self._unknown = Cache(self._unknown.blocks, longest)
        self.admission.resize({0: self._unknown})

    @asynccontextmanager
    async def place(self, chain: str, group: str) -> AsyncIterator[Place]:
        """Wait until a chain of `group` may begin, and hold its place during the `with` block."""
        place = Place(self, chain)
        await self._read_caches()
        self.admission.enter(place, group)
        try:
            await self.wait_for(place)
            yield place
        finally:
            self.admission.leave(place)
            self.settle()

    async def wait_for(self, place: Place) -> None:
        self.settle()
        while place.seat.state in (State.NEW, State.HELD):
            place.admitted.clear()
            try:
                await asyncio.wait_for(place.admitted.wait(), None if self._client is None else READ_SECONDS)
            except TimeoutError:
                await self._read_caches()

    def settle(self) -> None:
        """Let all go on that may; their turns are requested where they have seats."""
        admitted = self.admission.admit()
        if len(admitted) == AT_ONCE:
            asyncio.get_running_loop().call_soon(self.settle)
        for chain in admitted:
            assert isinstance(chain.key, Place)
            if self._client is not None and isinstance(chain.home, Replica):
                self._client.router.assign(chain.key.chain, chain.home)
            chain.key.admitted.set()

    async def take_figures(self, client: "InferenceClient") -> dict[str, float]:
        """Return the metrics of the servers' prefix caches since the last call, divided by the number of workers."""
        try:
            loads = (await client.loads()).values()
        except InferenceError:
            return {}
        prompt, cached = sum(load.prompt_tokens for load in loads), sum(load.cached_tokens for load in loads)
        now = prompt, cached, client.prefixes.sent, client.prefixes.once, client.router.moved
        before, self._computed = self._computed, now
        if before is None:
            return {}
        prompt, cached, sent, once, moved = (now - then for now, then in zip(self._computed, before, strict=True))
        if min(prompt, sent, once) <= 0:  # the counters of a restarted server begin at 0
            return {}
        # other workers and evaluations share the servers, so shares are compared
        again = (prompt - cached) / prompt * sent / once - 1
        return {
            "prefix/hit_share": cached / prompt / self.workers,
            "prefix/recomputed": max(0.0, again) / self.workers,
            "prefix/moved": float(moved),
        }

    def _part(self, load: Load) -> Cache:
        """Return the part of a replica's cache that belongs to this process."""
        blocks = load.blocks // self.workers
        return Cache(blocks, load.block_size, blocks // SPARE)

    async def _read_caches(self) -> None:
        if self._client is None:
            return
        if time.monotonic() < self._due:
            await self._read.wait()  # all wait for the first time
            return
        self._due, pause = inf, RETRY_SECONDS
        try:
            loads = await self._client.loads()
            pause = READ_SECONDS
        except InferenceError as error:
            # chains get the error from their own requests
            logger.info("cannot read the sizes of the servers' caches: %s", error)
            return
        finally:
            self._due = time.monotonic() + pause
            self._read.set()
        # SGLang reports no size while it is idle
        known = self.admission.caches
        caches = {
            replica: self._part(load) if load.blocks else known.get(replica, self._unknown)
            for replica, load in loads.items()
        }
        if caches and caches != self.admission.caches:
            self.admission.slots = self._most_requests * len(caches)
            self.admission.resize(caches)
            logger.info("caches of the servers, of which this process has its part: %s", caches)
            self.settle()
