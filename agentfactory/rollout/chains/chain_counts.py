"""Counts of the chains that run, for the user's display."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import astuple, dataclass, replace

from agentfactory.base.run_notices import clock
from agentfactory.rollout.chains.concurrency import Place
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient

_LOOK_SECONDS = 5.0
_ENOUGH = 0.02
"""Share of the tokens from which their rate, after the prompts, tells something about the time left."""


@dataclass
class ChainCounts:
    """Counts since a process's start: chains that were asked for, begun and ended, their turns, and sampled tokens."""

    asked: int = 0
    begun: int = 0
    ended: int = 0
    turns: int = 0
    tokens: int = 0
    """Tokens of ended turns."""
    served: float = 0.0
    """Tokens that the servers have sampled, those of running turns too; 0 if they do not tell."""

    def __add__(self, other: "ChainCounts") -> "ChainCounts":
        """Return the counts of two processes with the same servers."""
        sums = [mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)]
        return replace(ChainCounts(*sums), served=max(self.served, other.served))

    @asynccontextmanager
    async def chain(self, place: AbstractAsyncContextManager[Place]) -> AsyncIterator[Place]:
        """Count a chain that waits for its place, and runs there."""
        self.asked += 1
        try:
            async with place as held:
                self.begun += 1
                yield held
        finally:
            self.ended += 1


COUNTS = ChainCounts()
"""The counts of this process."""


def describe_progress(counts: Callable[[], ChainCounts], rollout: RolloutConfig) -> Callable[[float], str]:
    """Return a function for `doing` that describes the chains that have not ended yet."""
    before = counts()
    # the chains that still run belong to it
    before = replace(before, asked=before.ended, begun=before.ended)
    longest = min(rollout.max_turns * rollout.max_tokens, rollout.max_total_tokens)

    def describe(seconds: float) -> str:
        now = counts()
        asked, begun, ended, turns, own, served = (a - b for a, b in zip(astuple(now), astuple(before), strict=True))
        tokens = max(own, served)
        if not asked:
            return f"waiting for the first chain, {seconds:.0f} s so far"
        rate = tokens / max(seconds, 0.1)
        told = f"{begun} of {asked} chains begun, {ended} ended, {turns} turns, {rate:,.1f} tokens/s"
        done = max(ended, tokens / longest) / asked
        if (0 if ended else _ENOUGH) < done < 1:
            # before the first chain has ended, all could become as long as they may
            told += f", {'about' if ended else 'at most'} {clock(seconds * (1 - done) / done)} left"
        return f"sampling: {told}"

    return describe


async def follow_server(client: InferenceClient) -> None:
    """Count the tokens that the servers sample for this process, which ended turns alone would show late."""
    first: float | None = None
    while True:
        # chains get the error from their own requests
        with suppress(InferenceError, ServerUnreachableError):
            sampled = sum(load.generation_tokens for load in (await client.loads()).values())
            first = sampled if first is None else first
            COUNTS.served = max(COUNTS.served, sampled - first)
        await asyncio.sleep(_LOOK_SECONDS)
