"""Detection of servers that accept requests but produce no tokens: stopped, wedged, or paused and never resumed."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.http_transport import Connection, LostError
from agentfactory.rollout.inference.routing import Replica
from agentfactory.rollout.inference.server_metrics import Load, combined

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two checks of servers with pending requests."""
STALL_SECONDS = 20.0
"""Seconds without a token after which the user is informed."""
_HELD = "and it is paused or asleep"


@dataclass
class Stall:
    """The progress of one replica on its pending requests, which have `deadlines`. A pure state machine."""

    deadlines: list[asyncio.Timeout] = field(default_factory=list)
    reported_at: float | None = None
    """Start of the stall that the user was informed of; None if there is none."""
    _since: float = 0.0
    _tokens: float | None = None

    def begin(self, deadline: asyncio.Timeout, now: float) -> None:
        if not self.deadlines:
            self._since = now
        self.deadlines.append(deadline)

    def end(self, deadline: asyncio.Timeout, now: float) -> None:
        self.deadlines.remove(deadline)
        self._since = now

    def count(self, tokens: float, now: float) -> None:
        """Note the number of tokens that the replica has computed since its start."""
        if self._tokens not in (None, tokens):
            self._since = now
        self._tokens = tokens

    def seconds(self, now: float) -> float:
        """Return the seconds since the last progress; 0 without pending requests."""
        return now - self._since if self.deadlines else 0.0


class StallWatch:
    """A watchdog of the requests to all replicas. A replica that computes tokens is not stalled, however slow."""

    def __init__(self, connection: Connection, limit: float, patient: bool) -> None:
        """Requests are given up after `limit` seconds without progress; with `patient`, those to a replica that is
        paused or asleep, or does not report its progress, are not."""
        self._connection = connection
        self._patient = patient
        self._limit = limit
        self._stalls: defaultdict[str, dict[Replica, Stall]] = defaultdict(dict)
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def request(self, replica: Replica) -> AsyncIterator[None]:
        """Watch one request to `replica`, sent within the context. Raises LostError if the replica stalls."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        stall = self._stalls[replica.url].setdefault(replica, Stall())
        try:
            async with asyncio.timeout(None) as deadline:
                stall.begin(deadline, time.monotonic())
                try:
                    yield
                finally:
                    stall.end(deadline, time.monotonic())
        except TimeoutError as error:
            raise LostError(f"it gave no token for {self._limit:g} s") from error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.gather(*(self._look(url, stalls) for url, stalls in self._stalls.items()))

    async def _look(self, url: str, stalls: dict[Replica, Stall]) -> None:
        now = time.monotonic()
        if all(stall.seconds(now) < LOOK_SECONDS and stall.reported_at is None for stall in stalls.values()):
            return
        loads, reason = await self._ask(url)
        for replica, stall in stalls.items():
            if own := loads if replica.rank is None else loads[replica.rank :][:1]:
                load = combined(own)
                stall.count(load.prompt_tokens + load.generation_tokens, time.monotonic())
            name = f"server {replica.url}" + ("" if replica.rank is None else f", replica {replica.rank},")
            now = time.monotonic()
            quiet = stall.seconds(now)
            if quiet < STALL_SECONDS:
                if stall.reported_at is not None:
                    text = f"{name} gives tokens again, after {now - stall.reported_at:.0f} s"
                    notify(logger, f"{name} gives tokens again", text)
                    stall.reported_at = None
            elif reason is not None and stall.reported_at is None:
                stall.reported_at = now - quiet
                count = len(stall.deadlines)
                waiting = "1 request waits" if count == 1 else f"{count} requests wait"
                text = f"{name} has given no token for {quiet:.0f} s: {waiting}, {reason}"
                notify(logger, f"{name} gives no token", text)
            if quiet >= self._limit and not (self._patient and reason in (None, _HELD)):
                for deadline in stall.deadlines:
                    deadline.reschedule(asyncio.get_running_loop().time())

    async def _ask(self, url: str) -> tuple[list[Load], str | None]:
        """Return the load of each replica, and the likely reason for a stall; None if token counts are not reported."""
        try:
            loads = await self._connection.loads(url, LOOK_SECONDS)
            return loads, _HELD if await self._connection.holds_requests(url) else "and it computes none"
        except LostError:
            return [], "and it does not answer"
        except ValueError:
            return [], None
