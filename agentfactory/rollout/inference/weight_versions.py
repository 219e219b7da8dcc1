"""Staleness of tokens: the versions behind span labels, and counts of chains cancelled by the staleness bound."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group, Trajectory


@dataclass(frozen=True)
class Published:
    """The newest live weights: their version, the model name in requests, and the label in spans."""

    version: int
    model: str
    label: str


@dataclass
class WeightVersions:
    """A mapping of the span labels of all published weights to policy versions."""

    numbers: dict[str, int] = field(default_factory=dict)

    def note(self, published: Published) -> None:
        self.numbers[published.label] = published.version

    def number(self, label: str) -> int:
        """Return the version of `label`. Raises ValueError for a label that was not published."""
        if label not in self.numbers:
            raise ValueError(f"the server sampled with weights called {label!r}, which this run never published")
        return self.numbers[label]

    def age(self, label: str, version: int) -> int:
        """Return the staleness of the weights called `label` at `version`. Raises ValueError as `number` does."""
        return version - self.number(label)

    def ages(self, groups: list[Group], version: int) -> Counter[int]:
        """Count the sampled tokens by their staleness at `version`, in versions."""
        ages: Counter[int] = Counter()
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            for span in (span for row in trajectory.rows for span in row.versions):
                ages[self.age(span.version, version)] += span.end - span.start
        return ages

    def fresh(self, row: Row, version: int, most: int) -> np.ndarray:
        """Return, per token of the row, whether it is context or at most `most` versions old at `version`."""
        fresh = np.ones(len(row.token_ids), dtype=bool)
        for span in row.versions:
            fresh[span.start : span.end] = self.age(span.version, version) <= most
        return fresh


@dataclass
class Cancellations:
    """Counts of chains that are lost to the staleness bound, by task (a position in the data) and length in tokens."""

    groups: int = 0
    chains: int = 0
    tokens: int = 0
    lengths: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Task -> lengths of the chains lost so far."""
    _cancelled: Counter[int] = field(default_factory=Counter)
    _trained: set[int] = field(default_factory=set)

    def trained(self, task: int) -> None:
        """Note that a group of `task` went into a batch."""
        self._trained.add(task)

    def lost(self, task: int, chains: list[Trajectory]) -> list[int]:
        """Note that `chains` of `task` will not be trained, and return their lengths in tokens."""
        lengths = [sum(len(row.token_ids) for row in chain.rows) for chain in chains]
        self.chains += len(lengths)
        self.tokens += sum(lengths)
        self.lengths[task] += lengths
        return lengths

    def cancelled(self, task: int) -> bool:
        """Note that a group of `task` was cancelled. Return True if all its groups were, and at least two."""
        self.groups += 1
        self._cancelled[task] += 1
        return self._cancelled[task] >= 2 and task not in self._trained

    def take_figures(self) -> dict[str, float]:
        """Return the counts since the last call, by metric name."""
        counts = {"groups": self.groups, "chains": self.chains, "tokens": self.tokens}
        metrics = {f"cancelled/{name}": float(count) for name, count in counts.items()}
        self.groups = self.chains = self.tokens = 0
        return metrics
