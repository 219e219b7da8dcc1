"""Chains of a group that are the same, token by token: a sampler that does not draw."""

from collections.abc import Sequence

import numpy as np

from agentfactory.rollout.trajectory import Trajectory

UNLIKELY = -3.0
"""Log-probability of a chain below which its repetition is no chance."""


def could_differ(chains: Sequence[Trajectory]) -> bool:
    """Return whether several chains were sampled, none of which was nearly certain."""
    sums = [sum(float(np.sum(row.logprobs)) for row in chain.rows) for chain in chains]
    return len(chains) > 1 and all(total < UNLIKELY for total in sums)


def are_equal(chains: Sequence[Trajectory]) -> bool:
    """Return whether all chains have the same sampled tokens."""
    first, *others = map(_sampled, chains)
    return bool(first) and all(other == first for other in others)


def _sampled(chain: Trajectory) -> list[int]:
    return [int(token) for row in chain.rows for token in np.asarray(row.token_ids)[np.asarray(row.mask, dtype=bool)]]
