"""95 % confidence intervals of means over tasks, valid for few tasks and for means near 0 and 1.

Tasks are the units, because samples of the same task are correlated. The unit tests compute the coverage."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
_UPPER = (1 + LEVEL) / 2

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

    half = float(special.stdtrit(len(shares) - 1, _UPPER)) * math.sqrt(_squared_error(shares))
    return mean(shares) - half, mean(shares) + half


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


def _squared_error(shares: Sequence[Share]) -> float:
    """Return the squared standard error of `mean` over tasks, linearised because tasks with failed chains have lower
    weights (Cochran, 1977, Sampling Techniques, equation 6.13)."""
    value, tasks, weight = mean(shares), len(shares), sum(share.weight for share in shares)
    residuals = sum((share.total - value * share.weight) ** 2 for share in shares)
    return residuals / weight**2 * tasks / (tasks - 1)
