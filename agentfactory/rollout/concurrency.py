"""How many chains are alive at a time: a limit that may change, and what the server's load makes of it."""

import asyncio
from dataclasses import dataclass


class Places:
    """A semaphore whose size can change while it is held."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self._semaphore = asyncio.Semaphore(limit)
        self._excess = 0

    def resize(self, limit: int) -> None:
        """Allow `limit` holders. Where there are more, those that leave are not replaced until there are as few."""
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


@dataclass(frozen=True)
class Load:
    """What an inference server says of itself: requests that wait and run, and the share of its cache in use."""

    waiting: float
    running: float
    cache: float


METRICS_ROUTE = "/metrics"
_WAITING, _RUNNING, _CACHE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"


def parse_load(text: str) -> Load:
    """The load in a Prometheus page as vLLM writes it; several engines behind one address are summed, of their caches
    the fullest counts. Raises ValueError where one of the three figures is missing."""
    values: dict[str, list[float]] = {_WAITING: [], _RUNNING: [], _CACHE: []}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in values:
            values[name].append(float(line.rpartition(" ")[2]))
    for name, found in values.items():
        if not found:
            raise ValueError(f"the server's {METRICS_ROUTE} has no {name}")
    return Load(sum(values[_WAITING]), sum(values[_RUNNING]), max(values[_CACHE]))


def write_load(load: Load) -> str:
    """The page that `parse_load` reads."""
    figures = {_WAITING: load.waiting, _RUNNING: load.running, _CACHE: load.cache}
    return "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in figures.items())


FULL_CACHE = 0.9
"""Share of the server's cache above which it soon takes a request's blocks away to serve others."""


@dataclass
class ConcurrencyControl:
    """Additive increase, multiplicative decrease (Chiu and Jain, 1989) of the number of chains that are alive.

    Chains spend much of their time in tools, so more of them than the server decodes at a time keep it busy. While
    requests wait in the server or its cache is nearly full, a fifth fewer chains are let in; while neither is so and
    every place is taken, `step` more. `limit` stays at `step` or above.
    """

    limit: int
    step: int

    def observe(self, load: Load, alive: int) -> int:
        """The new limit after one look at the server, with `alive` chains at the time."""
        if load.waiting > 0 or load.cache > FULL_CACHE:
            # from what there is: a limit far above it would take many looks to come down to where it matters
            self.limit = max(self.step, min(self.limit, alive) * 4 // 5)
        elif alive >= self.limit:
            self.limit += self.step
        return self.limit
