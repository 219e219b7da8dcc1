"""Advantage estimators: from the rewards of a group to one number per chain."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL."""


def group_advantages(rewards: Sequence[float | None], scale: bool = True) -> list[float]:
    """Group-relative advantages (Shao et al., 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + 1e-4), with the sample standard deviation (n - 1), or A_i = r_i - mean(r)
    without `scale` (Liu et al., 2025, Dr. GRPO, arXiv:2503.20783, section 3.2).

    A chain without a reward (None: it broke) enters neither mean nor deviation, and its advantage is 0. Where all
    rewards are equal, or fewer than two chains have one, all advantages are 0. Raises ValueError where one is not
    finite.
    """
    known = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards must be finite numbers, not {known}")
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean = fmean(known)
    scaling = stdev(known) + STD_EPSILON if scale else 1.0
    return [0.0 if reward is None else (reward - mean) / scaling for reward in rewards]
