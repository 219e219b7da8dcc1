"""Thresholds, texts and fixes that the first look, the alarms of training and the audit share. Those of bad outcomes
stand in `agentfactory.rollout.chains.outcome_warnings`."""

from collections.abc import Mapping, Sequence

import numpy as np

from agentfactory.base.errors import plural
from agentfactory.base.findings import Finding, warning
from agentfactory.rollout.trajectory import Trajectory

ENOUGH_CHAINS, ENOUGH_GROUPS = 64, 32
"""Numbers from which on it is no chance that chains call no tool or wait, and that most groups have equal rewards."""
MOST_EQUAL = 0.8
"""Share of ENOUGH_GROUPS groups with equal rewards beyond which there is a finding; of fewer groups, all."""
EQUAL_STEPS = 5
"""Steps, or batches, in a row whose groups all have equal rewards."""
UNREADABLE, UNREADABLE_RISE = 0.5, 0.15
"""Share of unreadable turns, or of chains with one, and rise of that share, beyond which there is a finding."""
UNLIKELY = -3.0
"""Log-probability of a chain below which its repetition is no chance."""
DRAW = "let the server draw: a temperature above 0, and another seed for each chain"


def equal_rewards(rewards: Mapping[float, int], alike: bool, groups: int, equal: int) -> Finding | None:
    """Judge `groups` groups, `equal` of which give no signal because all their rewards are the same. `rewards` has the
    number of chains with each reward; `alike`: all chains have the same, also in each turn."""
    chains, most = sum(rewards.values()), max(rewards, key=rewards.__getitem__, default=0.0)
    if alike:
        text = f"the rewards of all {chains:,} chains in {plural(groups, 'group')} are {most:g}"
    elif groups > 1 and (equal == groups or (groups >= ENOUGH_GROUPS and equal > MOST_EQUAL * groups)):
        where = f"each of {groups:,}" if equal == groups else f"{equal:,} of {groups:,}"
        share = f"{rewards[most] / chains:.0%} of all rewards are {most:g}"
        text = f"in {where} groups all chains have the same reward ({share})"
    else:
        return None
    return warning("equal rewards", f"{text}: such groups teach nothing", fix_equal_rewards(most if alike else None))


def fix_equal_rewards(reward: float | None) -> str:
    """Return the fix for groups whose rewards are equal; `reward` is that of all chains, if they have the same."""
    if reward is None:
        return "rows of data that the model solves sometimes, a finer reward (rewards), or a larger rollout.group_size"
    if reward > 0:
        return "harder rows of data, or a reward that tells good chains from better ones (rewards)"
    return "easier rows of data, a reward that gives partial credit (rewards), or an sft stage first"


def fix_unreadable(own_loop: bool = False) -> str:
    """Return the fix for calls that cannot be read; an agent with its own loop takes no other format."""
    stage = "an sft stage on well-formed chains"
    return stage if own_loop else f"another rollout.parser, or {stage}"


def could_differ(chains: Sequence[Trajectory]) -> bool:
    """Return whether several chains were sampled, none of which was nearly certain."""
    sums = [sum(float(np.sum(row.logprobs)) for row in chain.rows) for chain in chains]
    return len(chains) > 1 and all(total < UNLIKELY for total in sums)


def are_equal(chains: Sequence[Trajectory]) -> bool:
    """Return whether all chains have the same sampled tokens."""
    rows = [[(np.asarray(row.token_ids), np.asarray(row.mask, dtype=bool)) for row in chain.rows] for chain in chains]
    first, *others = ([int(token) for ids, mask in each for token in ids[mask]] for each in rows)
    return bool(first) and all(other == first for other in others)


def offered(names: Sequence[str]) -> str:
    """Say that tools are offered, at most four by name."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} {'is' if len(names) == 1 else 'are'} offered"
