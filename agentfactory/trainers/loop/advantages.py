"""Advantages: how much better than expected a chain, a turn or a token was.

First the formulas. Per-token lists cover the sampled tokens of a chain; tool results in between are not steps. A chain
without a reward (None: it broke) is not part of a baseline, and its advantage is 0.

Then the estimators (`train.advantage.estimator`). One that takes `rewards` (of one group's chains), and perhaps
`batch_rewards` (of all chains), returns one advantage per chain, which all its tokens get. One that takes `groups` (the
batch's chains by group) returns a list per chain with an advantage per sampled token; with a critic, also targets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, starmap
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from agentfactory.base.errors import SettingError, short
from agentfactory.base.user_code.extension import load_extension
from agentfactory.trainers.config import AdvantageConfig

Scale = Literal["none", "group", "batch"]

STD_EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


def grpo_advantages(
    rewards: Sequence[float | None], scale: Scale = "group", batch_std: float | None = None
) -> list[float]:
    """Compute group-relative advantages (Shao et al., 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std + 1e-4), where std is the sample standard deviation (n - 1) of the group's rewards.
    With scale "batch", std is `batch_std`, over all rewards of the batch (Liu et al., 2025, arXiv:2508.08221); with
    "none", A_i = r_i - mean(r) (Liu et al., 2025, Dr. GRPO, arXiv:2503.20783, section 3.2).

    All advantages are 0 if all rewards are equal, or if fewer than two chains have one. Raises ValueError if a reward
    is not finite, or if `batch_std` is missing."""
    if not (known := _compared(rewards)):
        return [0.0] * len(rewards)
    if scale == "none":
        return _centred(rewards, known, 1.0)
    std = stdev(known) if scale == "group" else batch_std
    if std is None:
        raise ValueError("scale 'batch' needs the standard deviation of the batch's rewards")
    return _centred(rewards, known, std + STD_EPSILON)


def rloo_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Subtract the mean of the other chains' rewards (REINFORCE leave-one-out: Kool et al., 2019; Ahmadian et al.,
    2024, arXiv:2402.14740, RLOO):

    A_i = r_i - sum over j != i of r_j / (n - 1), which is n / (n - 1) times the distance from the group's mean.

    With fewer than two rewards, the advantages are 0. Raises ValueError if a reward is not finite."""
    known = _compared(rewards)
    return _centred(rewards, known, (len(known) - 1) / len(known)) if known else [0.0] * len(rewards)


def raft_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Select the group's best chains: A_i is 1 for the highest reward, and 0 for others, or for all if all are equal
    (rejection sampling: Dong et al., 2023, RAFT, arXiv:2304.06767, which selects one). The first gradient of an update
    is that of fine-tuning on the selected chains. Raises ValueError if a reward is not finite."""
    known = _compared(rewards)
    return [float(reward == max(known)) if known else 0.0 for reward in rewards]


def process_advantages(
    turn_rewards: Sequence[Sequence[float]], scale: Scale = "group", batch_std: float | None = None
) -> list[list[float]]:
    """Compute turn advantages from turn rewards (process supervision: DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    The rewards of all turns in the group are normalised together, like chain rewards in `grpo_advantages` (`batch_std`
    is over the batch's turns); a turn's advantage is the sum of the normalised rewards from that turn on. Argument and
    result have one list per chain, empty for a broken chain."""
    normalised = iter(grpo_advantages([reward for chain in turn_rewards for reward in chain], scale, batch_std))
    return [returns([next(normalised) for _ in chain]) for chain in turn_rewards]


def step_advantages(
    turn_returns: Sequence[Sequence[float]], anchors: Sequence[Sequence[str | None]], scale: Scale = "group"
) -> list[list[float]]:
    """Compare turns that begin in the same state (Feng et al., 2025, GiGPO, arXiv:2505.10978, equation 7).

    The returns of a group's turns with equal anchors are normalised like chain rewards in `grpo_advantages`. A turn
    without an anchor, or alone with its anchor, has advantage 0. Arguments and result have one list per chain, with an
    entry per turn. Raises ValueError if they differ in shape."""
    if [len(chain) for chain in turn_returns] != [len(chain) for chain in anchors]:
        raise ValueError("each turn needs a return and an anchor, which may be None")
    result = [[0.0] * len(chain) for chain in turn_returns]
    for members in step_groups(anchors):
        advantages = grpo_advantages([turn_returns[chain][turn] for chain, turn in members], scale)
        for (chain, turn), advantage in zip(members, advantages, strict=True):
            result[chain][turn] = advantage
    return result


def step_groups(anchors: Sequence[Sequence[str | None]]) -> list[list[tuple[int, int]]]:
    """Group turns, each as (chain, turn), by their anchors, one list per chain with an entry per turn."""
    members: dict[str, list[tuple[int, int]]] = {}
    for chain, of_chain in enumerate(anchors):
        for turn, anchor in enumerate(of_chain):
            if anchor is not None:
                members.setdefault(anchor, []).append((chain, turn))
    return list(members.values())


def returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Compute returns-to-go over a chain's sampled tokens or turns: G_t = r_t + gamma G_(t+1), and 0 after the last."""
    return [*accumulate(reversed(rewards), lambda later, reward: reward + gamma * later, initial=0.0)][:0:-1]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Apply generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438, equation 16) to the sampled
    tokens of a chain; return the advantages and the critic's target returns, A_t + V_t.

    A_t = delta_t + gamma lam A_(t+1) with delta_t = r_t + gamma V_(t+1) - V_t. V_t is the value of the state that
    predicts token t: tool tokens between t and t + 1 belong to the state and are not steps. A chain ends after its last
    token, where V and A are 0. Raises ValueError if the lengths differ."""
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards came with {len(values)} values")
    following = [*values[1:], 0.0]
    deltas = [reward + gamma * after - value for reward, value, after in zip(rewards, values, following, strict=False)]
    advantages = returns(deltas, gamma * lam)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whiten(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Whiten advantages, a list per chain, over all tokens of the batch (Hu et al., 2025, REINFORCE++,
    arXiv:2501.03262v9, equation 5, and 7 for the form with a group's baseline):

    (A - mean(A)) / (std(A) + 1e-8), with the population standard deviation. If all are equal, the result is 0."""
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


def _compared(rewards: Sequence[float | None]) -> list[float]:
    """Return the rewards that are known; none if there is nothing to compare: one alone, or all are equal."""
    known = _finite(rewards)
    return known if len(known) > 1 and min(known) != max(known) else []


def _centred(rewards: Sequence[float | None], known: Sequence[float], scaling: float) -> list[float]:
    mean = fmean(known)
    return [0.0 if reward is None else (reward - mean) / scaling for reward in rewards]


PerToken = list[list[float]]
"""A list per chain, in the order of the groups, with a number per sampled token."""


@dataclass(frozen=True)
class ChainRewards:
    """An estimator's information about a chain. "Token" means a token sampled by the policy."""

    reward: float
    turn_rewards: list[float]
    """Empty if the reward gives none."""
    turn_ends: list[int]
    """Number of tokens up to the end of each turn; empty if no turn is credited separately."""
    token_rewards: list[float]
    """Per token: the chain's reward at its last token and a turn's at the turn's last, minus the KL cost
    (train.loss.kl.place: reward). Empty for a chain that is not trained."""
    values: list[float] = field(default_factory=list)
    """The critic's value per token; empty without a critic."""
    anchors: list[str | None] = field(default_factory=list)
    """Per turn, an identifier of the state in which it begins; None, or an empty list, if unknown."""

    @property
    def tokens(self) -> int:
        return len(self.token_rewards)

    @property
    def turn_spans(self) -> list[tuple[int, int]]:
        return list(pairwise([0, *self.turn_ends]))

    @property
    def rewards_by_turn(self) -> list[float]:
        """The turn rewards, with the chain's reward added to the last turn's. Requires `turn_ends`."""
        rewards = list(self.turn_rewards) or [0.0] * len(self.turn_ends)
        if rewards:
            rewards[-1] += self.reward
        return rewards


Groups = Sequence[Sequence[ChainRewards]]


def grpo(rewards: Sequence[float], batch_rewards: Sequence[float], scale: Scale) -> list[float]:
    return grpo_advantages(rewards, scale, stdev(_finite(batch_rewards)) if len(batch_rewards) > 1 else None)


def raft(groups: Groups) -> PerToken:
    """Select whole chains by the sum of their rewards."""
    advantages: PerToken = []
    for group in groups:
        chosen = raft_advantages([chain.reward + sum(chain.turn_rewards) for chain in group])
        advantages += [[advantage] * chain.tokens for chain, advantage in zip(group, chosen, strict=True)]
    return advantages


def reinforce_pp_baseline(groups: Groups) -> PerToken:
    """Subtract the group's mean reward, and whiten over the batch."""
    return whiten(spread(groups, partial(grpo_advantages, scale="none"), "none"))


def gigpo(groups: Groups, scale: Scale, gamma: float) -> PerToken:
    """Compute group-in-group advantages (Feng et al., 2025, GiGPO, arXiv:2505.10978, equations 3, 5 and 8): the chain's
    advantage in its group, from the sum of its rewards, plus the turn's in step_advantages, from
    its return, discounted by `gamma` per turn."""
    advantages: PerToken = []
    for group in groups:
        whole = grpo_advantages([chain.reward + sum(chain.turn_rewards) for chain in group], scale)
        later = [returns(chain.rewards_by_turn, gamma) for chain in group]
        anchors = [chain.anchors or [None] * len(chain.turn_ends) for chain in group]
        steps = step_advantages(later, anchors, scale)
        advantages += starmap(_by_token, zip(group, whole, steps, strict=True))
    return advantages


def reinforce_pp(groups: Groups, gamma: float) -> PerToken:
    """Compute returns per token, whitened over the batch."""
    return whiten([returns(chain.token_rewards, gamma) for group in groups for chain in group])


def gae(groups: Groups, gamma: float, gae_lambda: float) -> tuple[PerToken, PerToken]:
    """Apply `generalized_advantages`, and whiten over the batch. The second lists are the critic's targets."""
    chains = [chain for group in groups for chain in group]
    found = [generalized_advantages(chain.token_rewards, chain.values, gamma, gae_lambda) for chain in chains]
    return whiten([advantages for advantages, _ in found]), [targets for _, targets in found]


def none(groups: Groups) -> PerToken:
    """Return 0 for each token: rewards are only reported."""
    return [[0.0] * chain.tokens for group in groups for chain in group]


_NAMED: list[Callable[..., Any]] = [grpo, reinforce_pp, reinforce_pp_baseline, gae, gigpo, raft, none]
ESTIMATORS = {"rloo": rloo_advantages} | {estimator.__name__: estimator for estimator in _NAMED}
"""`train.advantage.estimator` -> function. Its parameters are some of INPUTS, and the fields of its options."""

INPUTS = ("rewards", "batch_rewards", "groups")

_FIELD = "train.advantage.estimator"
_COMPARES_TURNS = (gigpo,)
_COMPARES_CHAINS = (raft, reinforce_pp_baseline, *_COMPARES_TURNS)
"""Estimators that take `groups` and compare a group's chains. Estimators that take `rewards` always do."""


class Estimator:
    """`train.advantage.estimator`: one of ESTIMATORS, or the user's own `FILE.py:NAME`."""

    def __init__(self, config: AdvantageConfig) -> None:
        """Raise SettingError if the function cannot be loaded or its parameters do not fit."""
        self._function = load_extension(_FIELD, config.estimator, ESTIMATORS, INPUTS, config)
        self._name, takes = self._function.name, self._function.takes
        self._judges_chains = "groups" not in takes
        if not self._judges_chains and len(takes) > 1:
            problem = f"{self._name} takes both {' and '.join(takes)}"
            raise SettingError(_FIELD, problem, "take groups alone, or rewards")
        if takes == ("batch_rewards",):
            raise SettingError(_FIELD, f"{self._name} takes batch_rewards without rewards", "take rewards too")

    @property
    def compares(self) -> bool:
        """True if the estimator compares the chains of a group and ignores per-token rewards. False, because it is
        unknown, for a user's function that takes `groups`."""
        return self._judges_chains or self._function.function in _COMPARES_CHAINS

    @property
    def compares_turns(self) -> bool:
        """True if the estimator compares turns that begin in the same state."""
        return self._function.function in _COMPARES_TURNS

    def __call__(self, groups: Groups) -> tuple[PerToken, PerToken]:
        """Return advantages per token, and the critic's target returns or an empty list. Raises SettingError."""
        if self._judges_chains:
            batch = [chain.reward for group in groups for chain in group]
            # turn rewards are scaled like the chains'
            scale: Scale = self._function.option("scale") or "none"
            return spread(groups, partial(self._of_group, batch), scale), []
        found = self._function(groups=groups)
        if not self._name:
            # our own functions may also return a critic's returns
            return found if isinstance(found, tuple) else (found, [])
        chains = [chain for group in groups for chain in group]
        advantages = _floats(found)
        if [len(values) for values in advantages] != [chain.tokens for chain in chains]:
            problem = f"{self._name} returned {short(found)}"
            fix = "return one flat list: for each chain of all groups in turn, a list of ChainRewards.tokens numbers"
            raise SettingError(_FIELD, problem, fix)
        return advantages, []

    def _of_group(self, batch_rewards: Sequence[float], rewards: Sequence[float]) -> list[float]:
        found = self._function(rewards=rewards, batch_rewards=batch_rewards)
        numbers: list[float] = next(iter(_floats([found])), [])
        if len(numbers) != len(rewards):
            problem = f"{self._name} returned {short(found)} for a group of {len(rewards)} chains"
            raise SettingError(_FIELD, problem, "return one number for each of rewards")
        return numbers


def _floats(lists: Any) -> PerToken:
    try:
        return [[float(value) for value in numbers] for numbers in lists]
    except (TypeError, ValueError, OverflowError):
        return []


def spread(groups: Groups, estimate: Callable[[list[float]], list[float]], scale: Scale) -> PerToken:
    """Compute advantages within groups by applying `estimate` to their rewards: all tokens of a chain get the chain's
    advantage, plus their turn's if there are turn rewards (see process_advantages, also for `scale`)."""
    turn_rewards = [reward for group in groups for chain in group for reward in chain.turn_rewards]
    turn_std = stdev(_finite(turn_rewards)) if len(turn_rewards) > 1 else None
    advantages: PerToken = []
    for group in groups:
        whole = estimate([chain.reward for chain in group])
        turns = process_advantages([chain.turn_rewards for chain in group], scale, turn_std)
        advantages += starmap(_by_token, zip(group, whole, turns, strict=True))
    return advantages


def _by_token(chain: ChainRewards, advantage: float, by_turn: Sequence[float]) -> list[float]:
    tokens = [advantage] * chain.tokens
    if by_turn:
        for (start, end), added in zip(chain.turn_spans, by_turn, strict=True):
            tokens[start:end] = [value + added for value in tokens[start:end]]
    return tokens


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """Return the amount, at most 0, to add to the reward of a chain of `length` tokens (Yu et al., 2025, DAPO,
    arXiv:2503.14476, equation 13, where the penalty is 1): 0 up to limit - buffer, then linear to -penalty at limit."""
    over = length - (limit - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0)
