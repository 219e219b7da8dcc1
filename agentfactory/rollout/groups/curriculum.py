"""Curriculum: a pure state machine that chooses the tasks, or the sources, to visit by the policy's success rates."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agentfactory.rollout.config import CurriculumConfig
from agentfactory.rollout.trajectory import Trajectory


def successes(
    chains: Sequence[Trajectory], setting: str = "rollout.curriculum", fix: str = "set rollout.curriculum=null"
) -> list[float]:
    """Return the `success` of each chain, which `setting` needs. Raise ValueError if a reward does not report it."""
    for chain in chains:
        if "success" not in chain.metrics:
            raise ValueError(
                f"{setting}: the reward of chain {chain.id} did not report success; return "
                f'{{"reward": ..., "success": 0 or 1}}, or {fix}'
            )
    return [chain.metrics["success"] for chain in chains]


@dataclass
class Curriculum:
    """Visits tasks (rows, or sources counted like them) that are solved or hopeless only occasionally, by the seed, the
    position and earlier observations. `name` is its metrics'; `share` weighs a new observation."""

    config: CurriculumConfig
    seed: int
    name: str = "curriculum"
    share: float = 0.5
    rates: dict[int, float] = field(default_factory=dict)
    _passed: int = 0

    def observe(self, row: int, successes: Sequence[float]) -> None:
        """Record the successes of a group's chains on `row`; the list is empty if no chain counts."""
        if successes:
            rate = fmean(successes)
            before = self.rates.get(row, rate)
            self.rates[row] = before + self.share * (rate - before)

    def passes_over(self, position: int, row: int) -> bool:
        """Return whether `row`, due at `position`, is skipped this time."""
        rate = self.rates.get(row)
        if rate is None or self.config.hopeless < rate < self.config.solved:
            return False
        passes = random.Random(f"{self.name}/{self.seed}/{position}").random() >= self.config.visit
        self._passed += passes
        return passes

    def take_figures(self) -> dict[str, float]:
        """Return the numbers of tasks skipped since the last call, now solved and now hopeless, by metric name."""
        metrics = {
            f"{self.name}/passed_over": float(self._passed),
            f"{self.name}/solved": float(sum(rate >= self.config.solved for rate in self.rates.values())),
            f"{self.name}/hopeless": float(sum(rate <= self.config.hopeless for rate in self.rates.values())),
        }
        self._passed = 0
        return metrics
