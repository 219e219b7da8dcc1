"""Evaluation metrics with their uncertainty: avg@k, unbiased pass@k, bootstrap intervals over tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentfactory.rollout.trajectory import Group

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 1 << 22
"""Maximum number of indices drawn at a time: 32 MB."""


@dataclass(frozen=True)
class Estimate:
    """The value of a metric, the ends of its 95 % interval, and the number of tasks behind it."""

    value: float
    low: float
    high: float
    tasks: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` samples of a task passes: the unbiased estimate from `samples` of
    which `passed` did, 1 - C(n - c, k) / C(n, k) (Chen et al., 2021, arXiv:2107.03374, equation 1).

    Raises ValueError for k above the number of samples, for which no unbiased estimate exists.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k is between 1 and the number of samples")
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())] if most > 0 else []


def bootstrap(sums: Sequence[float], weights: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of sum(sums) / sum(weights) over tasks (Efron and Tibshirani, 1993,
    chapter 13): tasks are drawn with replacement RESAMPLES times, each with all its samples. All weights are above
    0."""
    numerator, denominator = np.asarray(sums, dtype=float), np.asarray(weights, dtype=float)
    count = len(numerator)
    generator = np.random.default_rng(seed)
    drawn = np.empty(RESAMPLES)
    block = max(1, _BLOCK // count)
    for start in range(0, RESAMPLES, block):
        picks = generator.integers(count, size=(min(block, RESAMPLES - start), count))
        drawn[start : start + block] = numerator[picks].sum(axis=1) / denominator[picks].sum(axis=1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def sample_figures(groups: Sequence[Group], samples: int) -> dict[str, float]:
    """Return avg@`samples` and pass@k for each power of two k up to `samples`, by name; empty for one sample per task,
    or if no reward reports `success`."""
    return {name: _ratio(terms) for name, terms in _terms(groups, samples).items() if "@" in name}


def estimates(groups: Sequence[Group], samples: int, seed: int) -> dict[str, Estimate]:
    """Return `reward`, `success`, avg@k and pass@k with their intervals, as far as the chains report them.

    A chain without a reward failed and does not count. `reward` and `success` are means over chains; avg@k and pass@k
    are means over tasks of the values for each task's chains. A chain passes if its `success` is 1.
    """
    return {
        name: Estimate(_ratio(terms), *bootstrap([a for a, _ in terms], [b for _, b in terms], seed), len(terms))
        for name, terms in _terms(groups, samples).items()
    }


def by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Group by the task's `source` field, in order of first appearance; empty if no task has the field."""
    named = [group.task.get("source") not in (None, "") for group in groups]
    if not any(named):
        return {}
    sources: dict[str, list[Group]] = {}
    for group, has_source in zip(groups, named, strict=True):
        sources.setdefault(str(group.task["source"]) if has_source else "none", []).append(group)
    return sources


_Terms = list[tuple[float, float]]
"""The contribution of each task to a metric: a sum, and its weight."""


def _terms(groups: Sequence[Group], samples: int) -> dict[str, _Terms]:
    """Return the contributions of tasks to each metric, leaving out tasks that contribute nothing."""
    scored = [[t for t in group.trajectories if t.reward is not None] for group in groups]
    terms: dict[str, _Terms] = {
        "reward": [(sum(t.reward for t in chains if t.reward is not None), len(chains)) for chains in scored]
    }
    if any("success" in t.metrics for chains in scored for t in chains):
        successes = [[t.metrics.get("success", 0.0) for t in chains] for chains in scored]
        terms["success"] = [(sum(values), len(values)) for values in successes]
        if samples > 1:
            terms[f"avg@{samples}"] = [(sum(values) / len(values), 1) for values in successes if values]
            for k in powers_of_two(samples):
                terms[f"pass@{k}"] = [
                    # after failures, the remaining chains may be too few for an unbiased estimate
                    (pass_at_k(len(values), sum(value >= 1.0 for value in values), k), 1)
                    for values in successes
                    if len(values) >= k
                ]
    counted = {name: [(total, weight) for total, weight in of_task if weight] for name, of_task in terms.items()}
    return {name: of_task for name, of_task in counted.items() if of_task}


def _ratio(terms: _Terms) -> float:
    return sum(total for total, _ in terms) / sum(weight for _, weight in terms)
