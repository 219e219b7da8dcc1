"""The number of chains alive at a time: a limit that can change, and its control by the server's load."""

import asyncio
from dataclasses import dataclass

from agentfactory.rollout.inference.server_metrics import Load


class Places:
    """A semaphore that can be resized while it is held."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self._semaphore = asyncio.Semaphore(limit)
        self._excess = 0

    def resize(self, limit: int) -> None:
        """Allow `limit` holders. If there are more, places that become free are not given out until the number falls
        below it."""
        grown, self.limit = limit - self.limit, limit
        if grown < 0:
            self._excess -= grown
            return
        absorbed = min(grown, self._excess)
        self._excess -= absorbed
        for _ in range(grown - absorbed):
            self._semaphore.release()

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        while self._excess:
            self._excess -= 1
            await self._semaphore.acquire()
        self.taken += 1

    async def __aexit__(self, *_: object) -> None:
        self.taken -= 1
        if self._excess:
            self._excess -= 1
        else:
            self._semaphore.release()


FULL_CACHE = 0.9
"""Share of the server's cache above which it soon evicts the blocks of some requests to serve others."""


@dataclass
class ConcurrencyControl:
    """Controls the number of chains alive by additive increase, multiplicative decrease (Chiu and Jain, 1989).

    Chains spend much of their time in tools, so it takes more of them than the server decodes at a time to keep it
    busy. While requests wait in the server or its cache is nearly full, the limit falls by a fifth; otherwise, while
    every place is taken, it rises by `step`. `limit` never falls below `step`.
    """

    limit: int
    step: int

    def observe(self, load: Load, alive: int) -> int:
        """Return the new limit after one measurement of the server, with `alive` chains at that time."""
        if load.waiting > 0 or load.cache > FULL_CACHE:
            # lower from the actual number: from a limit far above it, many measurements would have no effect
            self.limit = max(self.step, min(self.limit, alive) * 4 // 5)
        elif alive >= self.limit:
            self.limit += self.step
        return self.limit
