"""A group reward by comparison: a judge says which of two chains is better, asked in both orders."""

import asyncio
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentfactory.people.judges.client import VerdictError
from agentfactory.people.judges.frames import draw_nonce
from agentfactory.people.judges.panel import Panel
from agentfactory.rollout.rewards.reward_spec import reward
from agentfactory.rollout.rewards.text import OPTIONS
from agentfactory.rollout.trajectory import Trajectory

_RESULTS = {"first": 1.0, "second": 0.0, "tie": 0.5}


@reward(group=True)
@dataclass(config=OPTIONS, kw_only=True)
class Pairwise(Panel):
    """The share of comparisons that a chain wins in its group, a tie as half of one. Each pair is asked in both orders;
    if the answers disagree, it is a tie."""

    criterion: str = "Which answer does the task better?"
    tournament: Literal["all", "knockout"] = "all"
    """Compare all pairs; or in rounds, in which only winners go on: n - 1 pairs of n chains."""

    async def __call__(self, trajectories: Sequence[Trajectory], **row: Any) -> list[dict[str, float]]:
        bouts: list[Bout] = []

        async def compare(pair: tuple[int, int]) -> float:
            """Return the result of the first of two chains."""
            one, other = (trajectories[index] for index in pair)
            if self.shown(one, "") == self.shown(other, ""):
                return 0.5
            bouts.append(bout := await self.compare(one, other, row))
            return bout.result

        left, points, played = [*range(len(trajectories))], [0.0] * len(trajectories), 0
        while len(left) > 1:
            rounds = self.tournament == "knockout"
            pairs = [*zip(left[::2], left[1::2], strict=False)] if rounds else [*combinations(left, 2)]
            # of an odd number, the last one advances without a match
            left = left[-1:] if rounds and len(left) % 2 else []
            for one in left:
                points[one] += 1.0
            for (one, other), result in zip(pairs, await asyncio.gather(*map(compare, pairs)), strict=True):
                points[one] += result
                points[other] += 1.0 - result
                left += [one if result >= 0.5 else other] * rounds
            played += 1 if rounds else len(trajectories) - 1
        figures = bias_of(bouts) | {"cached": fmean(bout.cached for bout in bouts) if bouts else 0.0}
        metrics = self.metrics(figures)
        return [{"reward": one / played if played else 0.5, **metrics} for one in points]

    async def compare(self, one: Trajectory, other: Trajectory, row: dict[str, Any]) -> "Bout":
        """Ask which of two chains is better, in both orders at once."""
        (ahead, cached), (behind, cached_too) = await asyncio.gather(
            self._ask(one, other, row), self._ask(other, one, row)
        )
        return Bout(ahead, behind, cached and cached_too)

    async def _ask(self, first: Trajectory, second: Trajectory, row: dict[str, Any]) -> tuple[float, bool]:
        """Return the result of the chain that is shown first, and whether it was cached."""
        nonce = draw_nonce()
        shown = (self.shown(chain, nonce, name) for chain, name in ((first, "first"), (second, "second")))
        asks = "\n\n".join(filter(None, (self.criterion, self.context_of(row, nonce), *shown)))
        found = await self.consult(asks, '"first" or "second" or "tie"', nonce, _result)
        return median(result for result, _ in found), all(cached for _, cached in found)


@dataclass
class Bout:
    """A comparison: the results, 1 for a win, of the chain that was shown first in each of the two orders."""

    ahead: float
    behind: float
    cached: bool = False

    @property
    def result(self) -> float:
        """The result of the first chain; a tie if the orders disagree."""
        return self.ahead if self.ahead == 1.0 - self.behind else 0.5


def bias_of(bouts: Sequence[Bout]) -> dict[str, float]:
    """Return `position_bias`, from -1 (the second place always wins) to 1 (the first does), and `disagreement`, the
    share of pairs on which the two orders disagree."""
    decided = [result for bout in bouts for result in (bout.ahead, bout.behind) if result != 0.5]
    return {
        "position_bias": 2.0 * fmean(decided) - 1.0 if decided else 0.0,
        "disagreement": fmean(bout.ahead != 1.0 - bout.behind for bout in bouts) if bouts else 0.0,
    }


def _result(value: Any) -> float:
    name = value.strip(" *_`\"'.").lower() if isinstance(value, str) else ""
    if name not in _RESULTS:
        raise VerdictError(f"the judge answered {value!r:.200}, which is neither first, second nor tie")
    return _RESULTS[name]
