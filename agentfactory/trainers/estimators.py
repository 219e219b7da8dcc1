"""Advantage estimators (`train.advantage.estimator`): compute an advantage per sampled token from a batch's rewards.

An estimator is a function of one of two kinds. A function that takes `rewards`, those of the chains of one group,
returns one advantage for each chain, which all its tokens get; it may also take `batch_rewards`, those of all chains of
the batch. A function that takes `groups`, the chains of the whole batch in their groups, returns a list per chain with
an advantage per token; with a critic, it also returns the returns that the critic learns, in the same shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import stdev
from typing import Any

from agentfactory.tools.errors import SettingError, short
from agentfactory.tools.extension import load_extension
from agentfactory.trainers.advantages import (
    Scale,
    generalized_advantages,
    grpo_advantages,
    process_advantages,
    returns,
    rloo_advantages,
    whiten,
)
from agentfactory.trainers.config import AdvantageConfig

PerToken = list[list[float]]
"""A list per chain, in the order of the groups, with a number per sampled token."""


@dataclass(frozen=True)
class ChainRewards:
    """The information about a chain that an estimator gets. Tokens are those that the policy sampled."""

    reward: float
    turn_rewards: list[float]
    """Empty if the reward gives none."""
    turn_ends: list[int]
    """Number of tokens up to the end of each turn; empty if no turn is credited separately."""
    token_rewards: list[float]
    """Per token: the chain's reward at the last token and a turn's at the turn's last, minus the cost of the distance
    to the reference (train.loss.kl.place: reward). Empty for a chain that is not trained."""
    values: list[float] = field(default_factory=list)
    """Per token, the critic's; empty without one."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.token_rewards)


Groups = Sequence[Sequence[ChainRewards]]


def grpo(rewards: Sequence[float], batch_rewards: Sequence[float], scale: Scale) -> list[float]:
    """See grpo_advantages."""
    return grpo_advantages(rewards, scale, stdev(batch_rewards) if len(batch_rewards) > 1 else None)


def rloo(rewards: Sequence[float]) -> list[float]:
    """See rloo_advantages."""
    return rloo_advantages(rewards)


def reinforce_pp_baseline(groups: Groups) -> PerToken:
    """Reward minus the group's mean, whitened over the batch: see whiten."""
    return whiten(spread(groups, partial(grpo_advantages, scale="none"), "none"))


def reinforce_pp(groups: Groups, gamma: float) -> PerToken:
    """Returns per token, whitened over the batch: see whiten."""
    return whiten([returns(chain.token_rewards, gamma) for group in groups for chain in group])


def gae(groups: Groups, gamma: float, gae_lambda: float) -> tuple[PerToken, PerToken]:
    """See generalized_advantages; whitened over the batch. The second lists are the critic's targets."""
    chains = [chain for group in groups for chain in group]
    found = [generalized_advantages(chain.token_rewards, chain.values, gamma, gae_lambda) for chain in chains]
    return whiten([advantages for advantages, _ in found]), [targets for _, targets in found]


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
}
"""`train.advantage.estimator` -> function. Its parameters are some of INPUTS, and fields of AdvantageConfig."""

INPUTS = ("rewards", "batch_rewards", "groups")


class Estimator:
    """`train.advantage.estimator`: one of ESTIMATORS, or the user's own `FILE.py:NAME`."""

    def __init__(self, config: AdvantageConfig) -> None:
        """Raises SettingError if it cannot be loaded or its parameters do not fit."""
        self._scale: Scale = config.scale if config.estimator == "grpo" else "none"
        self._function = load_extension("train.advantage.estimator", config.estimator, ESTIMATORS, INPUTS, config)
        takes = self._function.takes
        if "groups" in takes and len(takes) > 1:
            problem = f"{self._told} takes both {' and '.join(takes)}"
            raise SettingError("train.advantage.estimator", problem, "take groups alone, or rewards")
        if takes == ("batch_rewards",):
            problem = f"{self._told} takes batch_rewards without rewards"
            raise SettingError("train.advantage.estimator", problem, "take rewards too: they are those of one group")

    @property
    def _told(self) -> str:
        return self._function.name

    @property
    def compares(self) -> bool:
        """Whether it compares the chains of a group, and gives all tokens of a chain the same advantage."""
        return "groups" not in self._function.takes

    def __call__(self, groups: Groups) -> tuple[PerToken, PerToken]:
        """Returns advantages per token, and the returns that a critic learns (empty without one).

        Raises SettingError if the function returned something else.
        """
        if self.compares:
            batch = [chain.reward for group in groups for chain in group]
            return spread(groups, partial(self._of_group, batch), self._scale), []
        found = self._function(groups=groups)
        if not self._told:
            # our own functions may also return a critic's returns
            return found if isinstance(found, tuple) else (found, [])
        chains = [chain for group in groups for chain in group]
        try:
            advantages = [[float(value) for value in chain] for chain in found]
            fits = [len(values) for values in advantages] == [chain.tokens for chain in chains]
        except (TypeError, ValueError):
            fits = False
        if not fits:
            problem = f"{self._told} returned {short(found)}"
            fix = "return one flat list: for each chain of all groups in turn, a list of ChainRewards.tokens numbers"
            raise SettingError("train.advantage.estimator", problem, fix)
        return advantages, []

    def _of_group(self, batch_rewards: Sequence[float], rewards: Sequence[float]) -> list[float]:
        found = self._function(rewards=rewards, batch_rewards=batch_rewards)
        try:
            numbers = [float(value) for value in found]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != len(rewards):
            problem = f"{self._told} returned {short(found)} for a group of {len(rewards)} chains"
            raise SettingError("train.advantage.estimator", problem, "return one number for each of rewards")
        return numbers


def spread(groups: Groups, estimate: Callable[[list[float]], list[float]], scale: Scale) -> PerToken:
    """Computes advantages within groups, by applying `estimate` to their rewards: all tokens of a chain get the chain's
    advantage, plus that of their turn if the reward gives turn rewards (see process_advantages, also for `scale`)."""
    turn_rewards = [reward for group in groups for chain in group for reward in chain.turn_rewards]
    turn_std = stdev(turn_rewards) if len(turn_rewards) > 1 else None
    advantages: PerToken = []
    for group in groups:
        whole = estimate([chain.reward for chain in group])
        turns = process_advantages([chain.turn_rewards for chain in group], scale, turn_std)
        for chain, advantage, by_turn in zip(group, whole, turns, strict=True):
            tokens = [advantage] * chain.tokens
            if by_turn:
                for (start, end), added in zip(pairwise([0, *chain.turn_ends]), by_turn, strict=True):
                    tokens[start:end] = [value + added for value in tokens[start:end]]
            advantages.append(tokens)
    return advantages
