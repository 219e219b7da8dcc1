"""Estimates of what started chains are like, of which the slow ones are cancelled before they end.

Let G(t) be the probability that a chain is not cut before it is t seconds old, by the estimator of Kaplan and Meier
(1958) with cuts as events. A chain that ended after t seconds then stands for 1 / G(t) started ones, and means with
these weights estimate those of the started chains (inverse probability of censoring weighting, Robins and Rotnitzky,
1992). Chains that always outlast their groups are never seen, and no estimate includes them.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from agentfactory.rollout.trajectory import Trajectory

WINDOW = 4096
"""Number of recent chains from which G is estimated."""


@dataclass
class StartedChains:
    """The chains of a run, by their durations in seconds from the first turn; see the module."""

    _seen: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Per recent chain, its duration and whether it ended, rather than was cut."""
    _ended: list[tuple[float, Trajectory]] = field(default_factory=list)
    """The chains that ended since the figures were taken."""

    def ended(self, chain: Trajectory, seconds: float) -> None:
        """Record a chain that ended."""
        self._seen.append((seconds, True))
        self._ended.append((seconds, chain))

    def cut(self, seconds: float) -> None:
        """Record a chain that was cancelled while it ran."""
        self._seen.append((seconds, False))

    def weights(self, seconds: Sequence[float]) -> np.ndarray:
        """Return, for chains that ended after these `seconds`, the number of started chains that each stands for."""
        every = np.sort([duration for duration, _ in self._seen])
        cuts, counts = np.unique([duration for duration, ended in self._seen if not ended], return_counts=True)
        at_risk = len(every) - np.searchsorted(every, cuts)
        kept = np.cumprod([1.0, *(1.0 - counts / at_risk)])
        # no chain stands for more than all that were seen
        return 1.0 / np.maximum([kept[bisect_left(cuts, duration)] for duration in seconds], 1.0 / max(1, len(every)))

    def take_figures(self) -> dict[str, float]:
        """Return the estimated means over the started chains, from those that ended since the last call, by metric
        name; empty if no recent chain was cut."""
        ended, self._ended = self._ended, []
        scored = [(seconds, chain) for seconds, chain in ended if chain.reward is not None]
        if not scored or all(ended for _, ended in self._seen):
            return {}
        weights = self.weights([seconds for seconds, _ in scored]).tolist()
        columns: dict[str, list[float]] = {
            "started/success": [chain.metrics.get("success", math.nan) for _, chain in scored],
            "started/turns": [chain.turns for _, chain in scored],
            "started/sampled_tokens": [chain.metrics.get("sampled_tokens", math.nan) for _, chain in scored],
        }
        found = {name: fmean(values, weights) for name, values in columns.items()}
        # a reward may report no success, and an outside agent no tokens
        return {name: mean for name, mean in found.items() if not math.isnan(mean)}
