"""Notices servers that take requests and give no token: stopped, wedged, or paused and never resumed."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentfactory.rollout.inference.http_transport import Connection, LostError
from agentfactory.rollout.inference.routing import Replica
from agentfactory.rollout.inference.server_metrics import Load, combined
from agentfactory.tools.calls.run_notices import tell

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time between two looks at servers that owe an answer."""
STALL_SECONDS = 20.0
"""Time without a token after which a person is told."""
_HELD = "and it is paused or asleep"


@dataclass
class Stall:
    """What one replica does for the requests that it has. A pure state machine."""

    deadlines: list[asyncio.Timeout] = field(default_factory=list)
    """One per request that waits for its answer."""
    told: float | None = None
    """Time since which nothing came, if a person was told; None otherwise."""
    _since: float = 0.0
    _tokens: float | None = None

    def begin(self, deadline: asyncio.Timeout, now: float) -> None:
        """Note that a request was sent."""
        if not self.deadlines:
            self._since = now
        self.deadlines.append(deadline)

    def end(self, deadline: asyncio.Timeout, now: float) -> None:
        """Note that a request was answered or lost."""
        self.deadlines.remove(deadline)
        self._since = now

    def count(self, tokens: float, now: float) -> None:
        """Note how many tokens the replica has computed since it was started."""
        if self._tokens not in (None, tokens):
            self._since = now
        self._tokens = tokens

    def seconds(self, now: float) -> float:
        """Return for how long the replica has given no token although it has requests."""
        return now - self._since if self.deadlines else 0.0


class StallWatch:
    """Watches the requests to all replicas. Some answers take long: a replica that computes tokens is not stalled."""

    def __init__(self, connection: Connection, limit: float) -> None:
        """A request to a replica that has computed nothing for `limit` seconds, and is neither paused nor asleep, is
        lost."""
        self._connection = connection
        self._limit = limit
        self._stalls: defaultdict[str, dict[Replica, Stall]] = defaultdict(dict)
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def request(self, replica: Replica) -> AsyncIterator[None]:
        """Watch one request to `replica`, which is sent within the context. Raises LostError."""
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
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.gather(*(self._look(url, stalls) for url, stalls in self._stalls.items()))

    async def _look(self, url: str, stalls: dict[Replica, Stall]) -> None:
        now = time.monotonic()
        if all(stall.seconds(now) < LOOK_SECONDS and stall.told is None for stall in stalls.values()):
            return
        loads, reason = await self._ask(url)
        for replica, stall in stalls.items():
            if own := loads if replica.rank is None else loads[replica.rank :][:1]:
                load = combined(own)
                stall.count(load.prompt_tokens + load.generation_tokens, time.monotonic())
            self._judge(replica, stall, reason)

    def _judge(self, replica: Replica, stall: Stall, reason: str | None) -> None:
        """Tell a person if nothing comes, and give its requests up once that has lasted."""
        name = f"server {replica.url}" + ("" if replica.rank is None else f", replica {replica.rank},")
        now = time.monotonic()
        quiet = stall.seconds(now)
        if quiet < STALL_SECONDS:
            if stall.told is not None:
                text = f"{name} gives tokens again, after {now - stall.told:.0f} s"
                tell(logger, f"{name} gives tokens again", text)
                stall.told = None
        elif reason is not None and stall.told is None:
            stall.told = now - quiet
            count = len(stall.deadlines)
            waiting = "1 request waits" if count == 1 else f"{count} requests wait"
            text = f"{name} has given no token for {quiet:.0f} s: {waiting}, {reason}"
            tell(logger, f"{name} gives no token", text)
        if reason not in (None, _HELD) and quiet >= self._limit:
            for deadline in stall.deadlines:
                deadline.reschedule(asyncio.get_running_loop().time())

    async def _ask(self, url: str) -> tuple[list[Load], str | None]:
        """Return the load of each replica, and why they may give no token; None if the server does not report how many
        tokens it has computed."""
        try:
            loads = await self._connection.loads(url, LOOK_SECONDS)
            return loads, _HELD if await self._connection.holds_requests(url) else "and it computes none"
        except LostError:
            return [], "and it does not answer"
        except ValueError:
            return [], None
