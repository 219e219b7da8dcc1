"""The number of chains alive at a time: a limit that can change, and its control by the server's load."""

import asyncio
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Load:
    """What an inference server reports: waiting and running requests, the share of its cache in use, and how many
    tokens of prompts and answers it has computed since its start."""

    waiting: float
    running: float
    cache: float
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0


METRICS_ROUTE = "/metrics"
_WAITING, _RUNNING, _CACHE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
_PROMPTS, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


def parse_load(text: str) -> Load:
    """Read the load from a Prometheus page in vLLM's format. The counts of several engines behind one address are
    summed, and the fullest of their caches counts. Raises ValueError if one of the metrics is missing."""
    values: dict[str, list[float]] = {name: [] for name in (_WAITING, _RUNNING, _CACHE, _PROMPTS, _GENERATED)}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in values:
            values[name].append(float(line.rpartition(" ")[2]))
    for name, found in values.items():
        if not found:
            raise ValueError(f"the server's {METRICS_ROUTE} has no {name}")
    waiting, running, prompts, generated = (sum(values[name]) for name in (_WAITING, _RUNNING, _PROMPTS, _GENERATED))
    return Load(waiting, running, max(values[_CACHE]), prompts, generated)


def write_load(load: Load) -> str:
    """Write the page that `parse_load` reads."""
    gauges = {_WAITING: load.waiting, _RUNNING: load.running, _CACHE: load.cache}
    counters = {_PROMPTS: load.prompt_tokens, _GENERATED: load.generation_tokens}
    kinds = ("gauge", gauges), ("counter", counters)
    return "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for kind, of in kinds for name, value in of.items())


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
