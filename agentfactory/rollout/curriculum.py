"""Curriculum: which tasks are visited, by how often the policy solves them. A pure state machine."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agentfactory.rollout.config import CurriculumConfig
from agentfactory.rollout.trajectory import Trajectory


def successes(chains: Sequence[Trajectory]) -> list[float]:
    """The `success` of each chain. Raises ValueError where a reward does not say it."""
    for chain in chains:
        if "success" not in chain.metrics:
            raise ValueError(
                f"rollout.curriculum: the reward of chain {chain.id} does not say whether it is a success; return "
                '{"reward": ..., "success": 0 or 1}, or set rollout.curriculum=null'
            )
    return [chain.metrics["success"] for chain in chains]


@dataclass
class Curriculum:
    """Passes over tasks that are solved or hopeless at present, and visits them only at times.

    A task (a row of the data) that was never visited is neither. Which ones are passed over depends on the seed, the
    position in the order of tasks and what was observed before, and on nothing else.
    """

    config: CurriculumConfig
    seed: int
    rates: dict[int, float] = field(default_factory=dict)
    """Row -> success rate."""
    _passed: int = 0

    def observe(self, row: int, successes: Sequence[float]) -> None:
        """The chains of a group on `row` ended so; none of them may count."""
        if successes:
            rate = fmean(successes)
            self.rates[row] = (self.rates.get(row, rate) + rate) / 2

    def passes_over(self, position: int, row: int) -> bool:
        """Whether `row`, whose turn it is at `position`, is not visited this time."""
        rate = self.rates.get(row)
        if rate is None or self.config.hopeless < rate < self.config.solved:
            return False
        passes = random.Random(f"curriculum/{self.seed}/{position}").random() >= self.config.visit
        self._passed += passes
        return passes

    def take_figures(self) -> dict[str, float]:
        """Tasks passed over since the last call; how many are solved and hopeless now. By metric name."""
        figures = {
            "curriculum/passed_over": float(self._passed),
            "curriculum/solved": float(sum(rate >= self.config.solved for rate in self.rates.values())),
            "curriculum/hopeless": float(sum(rate <= self.config.hopeless for rate in self.rates.values())),
        }
        self._passed = 0
        return figures
