"""A resizable limit on the number of live chains, and the rule that sets it by the server's load."""

import asyncio

from agentfactory.base.errors import SettingError
from agentfactory.base.http.connections import raise_open_files
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.server_metrics import Load


class Places:
    """A semaphore that can be resized while it is held."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self._semaphore = asyncio.Semaphore(limit)
        self._excess = 0

    def resize(self, limit: int) -> None:
        """Allow `limit` holders. Of more, released places stay unused until the number falls below `limit`."""
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
"""KV cache usage above which the server will soon evict some requests' blocks to serve others."""


def next_limit(limit: int, step: int, load: Load, alive: int) -> int:
    """Return the new limit of live chains after one load measurement, taken with `alive` of them, by additive increase
    and multiplicative decrease (Chiu and Jain, 1989). While requests wait in the server or its cache is nearly full, it
    falls by a fifth. Otherwise, while every place is taken, it rises by `step`, below which it never falls."""
    if load.waiting > 0 or load.cache > FULL_CACHE:
        # start from the actual number: lowering a limit far above it would have no effect for many measurements
        return max(step, min(limit, alive) * 4 // 5)
    return limit + step if alive >= limit else limit


def most_chains(recipe: RolloutRecipe, workers: int = 1) -> int:
    """Return the maximum number of live chains of one of `workers`. With rollout.concurrency=auto, each may have as
    many as the server takes."""
    limit = recipe.rollout.concurrency
    return recipe.server.max_num_seqs if limit == "auto" else -(-limit // workers)


def check_open_files(chains: int) -> None:
    """Raise SettingError if this process may not open a connection for each of `chains`, and as many other files."""
    files = raise_open_files()
    if files is not None and chains > files // 2:
        problem = f"{chains} chains at a time each need a connection, but a process may open {files} files (ulimit -n)"
        raise SettingError("rollout.concurrency", problem, f"lower it to {files // 2}, or raise that limit")
