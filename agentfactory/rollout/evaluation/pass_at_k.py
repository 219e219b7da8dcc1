"""Evaluation metrics with their uncertainty: avg@k, unbiased pass@k, confidence intervals over tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentfactory.rollout.evaluation.intervals import Share, mean, of_mean, of_proportion
from agentfactory.rollout.trajectory import Group


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
