"""Advantage formulas: compute from rewards how much better than expected a chain, a turn or a token was.

Per-token lists contain only the sampled tokens of a chain; tool results between them are not steps. A chain without a
reward (None: it broke) enters no baseline, and its advantage is 0.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

import numpy as np

Scale = Literal["none", "group", "batch"]

STD_EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


def grpo_advantages(
    rewards: Sequence[float | None], scale: Scale = "group", batch_std: float | None = None
) -> list[float]:
    """Group-relative advantages (Shao et al., 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std + 1e-4), where std is the sample standard deviation (n - 1) of the group's rewards.
    With scale "batch", std is `batch_std`, that of all rewards of the batch (Liu et al., 2025, arXiv:2508.08221); with
    "none", A_i = r_i - mean(r) (Liu et al., 2025, Dr. GRPO, arXiv:2503.20783, section 3.2).

    All advantages are 0 if all rewards are equal, or if fewer than two chains have one. Raises ValueError if a reward
    is not finite, or if `batch_std` is missing.
    """
    known = _finite(rewards)
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean, scaling = fmean(known), _scaling(known, scale, batch_std)
    return [0.0 if reward is None else (reward - mean) / scaling for reward in rewards]


def rloo_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of the others' (REINFORCE leave-one-out: Kool et al., 2019; Ahmadian et al., 2024,
    arXiv:2402.14740, RLOO):

    A_i = r_i - sum over j != i of r_j / (n - 1), which is n / (n - 1) times the distance from the group's mean.

    With fewer than two rewards, the advantages are 0. Raises ValueError if a reward is not finite.
    """
    known = _finite(rewards)
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean, scaling = fmean(known), (len(known) - 1) / len(known)
    return [0.0 if reward is None else (reward - mean) / scaling for reward in rewards]


def process_advantages(
    turn_rewards: Sequence[Sequence[float]], scale: Scale = "group", batch_std: float | None = None
) -> list[list[float]]:
    """Advantages of turns from rewards of turns (process supervision: DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    The rewards of all turns in the group are normalised together, like chain rewards in `grpo_advantages`; a turn's
    advantage is the sum of the normalised rewards from that turn on. `turn_rewards` has one list per chain, empty for
    one that broke; the result has the same shape. With scale "batch", `batch_std` is that of the rewards of all turns
    of the batch.
    """
    normalised = iter(grpo_advantages([reward for chain in turn_rewards for reward in chain], scale, batch_std))
    return [returns([next(normalised) for _ in chain]) for chain in turn_rewards]


def returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Returns-to-go over the sampled tokens of a chain: G_t = r_t + gamma G_(t+1), and 0 after the last token."""
    result: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        result.append(following)
    return result[::-1]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438, equation 16), over the sampled tokens
    of a chain; returns the advantages and the critic's target returns, A_t + V_t.

    A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t. V_t is the value of the state that
    predicts token t: tool tokens between t and t + 1 belong to the state and are not steps. A chain ends after its last
    token, where V and A are 0. Raises ValueError if the lengths differ.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards came with {len(values)} values")
    following = [*values[1:], 0.0]
    deltas = [reward + gamma * after - value for reward, value, after in zip(rewards, values, following, strict=False)]
    advantages = returns(deltas, gamma * lam)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whiten(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Whitens advantages per chain and token: subtracts the mean and divides by the standard deviation, both over all
    tokens of the batch (Hu et al., 2025, REINFORCE++, arXiv:2501.03262v9, equation 5, and 7 for the form with a group's
    baseline):

    (A - mean(A)) / (std(A) + 1e-8), with the population standard deviation. If all are equal, the result is 0.
    """
    flat = np.concatenate([np.zeros(0), *(np.asarray(chain, dtype=np.float64) for chain in advantages)])
    if flat.size == 0 or flat.min() == flat.max():
        return [[0.0] * len(chain) for chain in advantages]
    whitened = (flat - flat.mean()) / (flat.std() + 1e-8)
    ends = np.cumsum([len(chain) for chain in advantages])
    return [part.tolist() for part in np.split(whitened, ends[:-1])]


def _finite(rewards: Sequence[float | None]) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards must be finite numbers, not {known}")
    return known


def _scaling(known: Sequence[float], scale: Scale, batch_std: float | None) -> float:
    match scale:
        case "none":
            return 1.0
        case "group":
            return stdev(known) + STD_EPSILON
        case "batch":
            if batch_std is None:
                raise ValueError("scale 'batch' needs the standard deviation of the batch's rewards")
            return batch_std + STD_EPSILON
