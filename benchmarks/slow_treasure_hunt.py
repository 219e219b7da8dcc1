"""The quickstart's environment with slow tools: their latency is log-normal, and sometimes many times as long."""

import asyncio
import random
from pathlib import Path
from typing import Any, Literal

from agentfactory import tool
from agentfactory.base.user_code.loading import load_object

_QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart"
TreasureHunt = load_object("treasure_hunt.py:TreasureHunt", _QUICKSTART)

_draws = random.Random(0)


def draw_latency(draws: random.Random, median: float, sigma: float, tail: float, factor: float) -> float:
    """Return the seconds of one call: log-normal with `median` and the logarithm's standard deviation `sigma`; a share
    `tail` of the calls takes `factor` times as long."""
    return median * draws.lognormvariate(0.0, sigma) * (factor if draws.random() < tail else 1.0)


class SlowTreasureHunt(TreasureHunt):
    """A hunt with slow moves; the task's `latency` has the parameters of `draw_latency`."""

    def reset(self, start: list[int], treasure: list[int], latency: dict[str, float], **task: Any) -> None:
        """Begin at cell `start` with the treasure at cell `treasure`."""
        super().reset(start, treasure)
        self.latency = latency

    @tool
    async def move(self, direction: Literal["north", "east", "south", "west"]) -> str:
        """Take one step."""
        await asyncio.sleep(draw_latency(_draws, **self.latency))
        return super().move(direction)


class SlowFindHunt(SlowTreasureHunt):
    """A hunt in which only the move that finds the treasure is slow: chains that take long are the right ones."""

    @tool
    async def move(self, direction: Literal["north", "east", "south", "west"]) -> str:
        """Take one step."""
        observation = TreasureHunt.move(self, direction)
        if self.here == self.treasure:
            await asyncio.sleep(draw_latency(_draws, **self.latency))
        return observation
