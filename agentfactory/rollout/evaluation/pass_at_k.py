"""Evaluation metrics with their uncertainty: avg@k, unbiased pass@k, and 95 % confidence intervals of means over tasks.
Tasks are the units, because samples of one task are correlated. The unit tests compute the coverage."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from agentfactory.rollout.trajectory import Group, Trajectory

# ---- intervals, valid for few tasks and for means near 0 and 1

_UPPER = 0.975  # of a 95 % interval

Interval = tuple[float, float]


class Share(NamedTuple):
    """The contribution of a task to a mean: a sum and its weight, above 0."""

    total: float
    weight: float


def mean(shares: Sequence[Share]) -> float:
    """Return the sum of the totals over the sum of the weights."""
    return sum(share.total for share in shares) / sum(share.weight for share in shares)


def of_proportion(shares: Sequence[Share]) -> Interval:
    """Return the interval of a mean of values between 0 and 1: Gaffke's bounds (2005, "Three test statistics for a
    nonparametric one-sided hypothesis on the mean of a nonnegative variable"; Learned-Miller and Thomas, 2020,
    arXiv:1905.06208). With one chain per task, it is that of Clopper and Pearson (1934, Biometrika 26)."""
    failed = [Share(share.weight - share.total, share.weight) for share in shares]
    return _lower_bound(shares), 1.0 - _lower_bound(failed)


def of_mean(shares: Sequence[Share]) -> Interval | None:
    """Return the interval of a mean of any numbers, by Student's t with the standard error over tasks; None if all
    tasks are equal or there is only one, because then the error is unknown."""
    values = [share.total / share.weight for share in shares]
    if math.isclose(min(values), max(values), abs_tol=1e-12):
        return None
    # imported late: the worker of a training run computes no intervals
    from scipy import special

    # the standard error is linearised, because tasks with failed chains have lower weights (Cochran, 1977, Sampling
    # Techniques, equation 6.13)
    value, tasks, weight = mean(shares), len(shares), sum(share.weight for share in shares)
    residuals = sum((share.total - value * share.weight) ** 2 for share in shares)
    error = math.sqrt(residuals / weight**2 * tasks / (tasks - 1))
    half = float(special.stdtrit(tasks - 1, _UPPER)) * error
    return value - half, value + half


def _lower_bound(shares: Sequence[Share]) -> float:
    """Return the 2.5 % quantile of the mean if tasks have random exponential weights, and one further task fails."""
    from scipy import optimize

    value = mean(shares)
    if value <= 0.0:
        return 0.0
    # tasks that are alike share a row
    alike = Counter(shares) + Counter([Share(0.0, sum(share.weight for share in shares) / len(shares))])
    totals, weights = np.array(list(alike), dtype=float).T
    counts = np.array(list(alike.values()), dtype=float)

    def excess(bound: float) -> float:
        return _chance_not_positive(totals - bound * weights, counts) - (1 - _UPPER)

    least = 1e-12 * value
    return float(optimize.brentq(excess, least, value, xtol=1e-10)) if excess(least) < 0 else 0.0


def _chance_not_positive(coefficients: np.ndarray, counts: np.ndarray) -> float:
    """Return P(S <= 0) for a sum S of independent exponential variables times `coefficients`, each `counts` times, by
    inversion of the characteristic function (Gil-Pelaez, 1951, Biometrika 38); 0 or 1 if within 0.01 of that."""
    coefficients = coefficients / np.abs(coefficients).max()
    expected, deviation = float(coefficients @ counts), math.sqrt(float(coefficients**2 @ counts))
    if abs(expected) > 10 * deviation:  # Cantelli's inequality; the integrand would oscillate too fast for the step
        return float(expected < 0)
    # the integrand is smooth in the logarithm of the frequency, where the trapezoidal rule converges exponentially
    step = 0.02
    frequency = np.exp(np.arange(-30.0, 30.0, step))[:, None]
    angle = np.arctan(frequency * coefficients) @ counts
    size = np.log1p((frequency * coefficients) ** 2) @ counts / 2
    return float(0.5 - (np.sin(angle) * np.exp(-size)).sum() * step / math.pi)


# ---- metrics


@dataclass(frozen=True)
class Estimate:
    """The value of a metric, the bounds of its 95 % interval (None: unknown), and its number of tasks."""

    value: float
    low: float | None
    high: float | None
    tasks: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` samples passes, if `passed` of `samples` did: 1 - C(n
    - c, k) / C(n, k) (Chen et al., 2021, arXiv:2107.03374, equation 1). Raise ValueError if k > n."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the number of samples")
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_figures(chains: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the chains with a reward that have the value, and `failed`, the share of chains without one."""
    scored = [t for t in chains if t.reward is not None]
    means = {"failed": 1 - len(scored) / len(chains)}
    if scored:
        means["reward"] = fmean(t.reward for t in scored if t.reward is not None)
        names = sorted({name for t in scored for name in t.metrics})
        means |= {name: fmean(t.metrics[name] for t in scored if name in t.metrics) for name in names}
    return means


def sample_figures(groups: Sequence[Group], samples: int) -> dict[str, float]:
    """Return avg@`samples` and pass@k for each power of two k up to `samples`, by name; empty for one sample."""
    return {name: mean(shares) for name, shares in _shares(groups, samples).items() if "@" in name}


def estimates(groups: Sequence[Group], samples: int) -> dict[str, Estimate]:
    """Return `reward`, `success`, avg@k and pass@k with their intervals, of chains with a reward. The first two are
    means over chains, the others over tasks. A chain passes if its `success` is 1."""
    found = {}
    for name, shares in _shares(groups, samples).items():
        # rewards may have any bounds, even if all observed ones lie between 0 and 1
        proportion = name != "reward" and all(0.0 <= share.total <= share.weight for share in shares)
        low, high = of_proportion(shares) if proportion else of_mean(shares) or (None, None)
        found[name] = Estimate(mean(shares), low, high, len(shares))
    return found


def by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Group by source, or else by the task's `source` field; empty if no group has either."""
    names = [group.source or group.task.get("source") for group in groups]
    if all(name in (None, "") for name in names):
        return {}
    sources: dict[str, list[Group]] = {}
    for group, name in zip(groups, names, strict=True):
        sources.setdefault("none" if name in (None, "") else str(name), []).append(group)
    return sources


def _shares(groups: Sequence[Group], samples: int) -> dict[str, list[Share]]:
    """Return the shares of tasks by metric, without those that have no value."""
    scored = [[t for t in group.trajectories if t.reward is not None] for group in groups]
    rewards = [[t.reward for t in chains if t.reward is not None] for chains in scored if chains]
    shares = {"reward": [Share(sum(values), len(values)) for values in rewards]}
    reported = [[t.metrics["success"] for t in chains if "success" in t.metrics] for chains in scored]
    if successes := [values for values in reported if values]:
        shares["success"] = [Share(sum(values), len(values)) for values in successes]
        if samples > 1:
            shares[f"avg@{samples}"] = [Share(sum(values) / len(values), 1) for values in successes]
            for k in (1 << power for power in range(samples.bit_length())):
                shares[f"pass@{k}"] = [
                    # after failures, the remaining chains may be too few for an unbiased estimate
                    Share(pass_at_k(len(values), sum(value >= 1.0 for value in values), k), 1)
                    for values in successes
                    if len(values) >= k
                ]
    return {name: of_tasks for name, of_tasks in shares.items() if of_tasks}
