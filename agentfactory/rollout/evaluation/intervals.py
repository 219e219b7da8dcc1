"""95 % confidence intervals of means over tasks, valid for few tasks and for means near 0 and 1.

Tasks are the units, because samples of the same task are correlated. The unit tests compute the coverage.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95
_UPPER = (1 + LEVEL) / 2

Interval = tuple[float, float]


class Share(NamedTuple):
    """The contribution of a task to a mean: a sum and its weight, above 0. `trials` is its number of independent
    observations: its chains, or for pass@k its disjoint sets of k chains."""

    total: float
    weight: float
    trials: int


def mean(shares: Sequence[Share]) -> float:
    """Return the sum of the totals over the sum of the weights."""
    return sum(share.total for share in shares) / sum(share.weight for share in shares)


def of_proportion(shares: Sequence[Share]) -> Interval:
    """Return the interval of a mean of values between 0 and 1: the Clopper-Pearson interval (1934, Biometrika 26),
    exact for one chain per task, with the effective sample size of Korn and Graubard (1998, Survey Methodology 24) for
    several.

    The effective sample size is the number of trials divided by the design effect, estimated from the differences
    between tasks, times the square of a ratio of t quantiles, which corrects for few tasks. If the mean is 0 or 1, or
    if there is one task, it is the number of tasks.
    """
    # imported late: the worker of a training run computes no intervals
    from scipy import special

    value, tasks, trials = mean(shares), len(shares), sum(share.trials for share in shares)
    number = float(tasks)
    if 0.0 < value < 1.0 and tasks > 1:
        squared_error = _squared_error(shares)
        if squared_error > 0.0:
            effective = trials * (value * (1 - value) / (trials - 1) / squared_error)
            quantiles = special.stdtrit(trials - 1, _UPPER) / special.stdtrit(tasks - 1, _UPPER)
            number = min(effective * float(quantiles) ** 2, trials)
        else:
            number = trials
    passed, failed = value * number, (1 - value) * number
    low = float(special.betaincinv(passed, failed + 1, 1 - _UPPER)) if value > 0 else 0.0
    high = float(special.betaincinv(passed + 1, failed, _UPPER)) if value < 1 else 1.0
    return low, high


def of_mean(shares: Sequence[Share]) -> Interval | None:
    """Return the interval of a mean of any numbers, by Student's t with the standard error over tasks; None if all
    tasks are equal or there is only one, because then the error is unknown."""
    values = [share.total / share.weight for share in shares]
    if math.isclose(min(values), max(values), abs_tol=1e-12):
        return None
    from scipy import special

    half = float(special.stdtrit(len(shares) - 1, _UPPER)) * math.sqrt(_squared_error(shares))
    return mean(shares) - half, mean(shares) + half


def _squared_error(shares: Sequence[Share]) -> float:
    """Return the squared standard error of `mean` over tasks, linearised because tasks with failed chains have lower
    weights (Cochran, 1977, Sampling Techniques, equation 6.13)."""
    value, tasks, weight = mean(shares), len(shares), sum(share.weight for share in shares)
    residuals = sum((share.total - value * share.weight) ** 2 for share in shares)
    return residuals / weight**2 * tasks / (tasks - 1)
