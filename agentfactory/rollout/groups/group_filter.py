"""A filter of groups by their training signal, as a pure function of their chains, with counts of filtered groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentfactory.rollout.chains.outcome_warnings import commonest_ending
from agentfactory.rollout.config import EqualRewards, OutcomePolicy, RolloutConfig
from agentfactory.rollout.trajectory import Trajectory

MAX_LOST_IN_A_ROW = 64
"""Number of consecutive lost groups at which the run stops: so many cannot be chance."""
MAX_EQUAL_IN_A_ROW = 256
"""Number of consecutive groups with equal rewards at which the run stops. The limit is higher because such groups are
common with hard tasks: if one chain in a hundred succeeds, 23 of 25 groups of 8 have equal rewards."""


class Worth(StrEnum):
    """The training signal of a group, whose chains advantages compare."""

    TEACHES = "teaches"
    EQUAL = "equal"
    """All chains have the same reward and turn rewards, so their advantages are 0."""
    LOST = "lost"
    """Fewer than two chains count (fewer than one, if groups have one chain), or none is trained."""


def counted(chains: Sequence[Trajectory], config: RolloutConfig) -> list[Trajectory]:
    """Return the chains that baselines include: scored chains whose outcome `rollout.on_outcome` keeps or masks."""
    return [chain for chain in chains if chain.reward is not None and config.outcome_policy(chain.outcome).scored]


def worth(chains: Sequence[Trajectory], config: RolloutConfig) -> Worth:
    counting = counted(chains, config)
    trained = any(config.outcome_policy(chain.outcome) is OutcomePolicy.KEEP for chain in counting)
    if len(counting) < min(2, config.group_size) or not trained:
        return Worth.LOST
    differ = len({(chain.reward, *(chain.turn_rewards or ())) for chain in counting}) > 1
    return Worth.TEACHES if differ else Worth.EQUAL


@dataclass
class GroupFilter:
    """A filter that judges complete groups by the recipe, counts the filtered ones, and detects when further groups are
    hopeless. `at_once` is the maximum number of open groups; groups with equal rewards are often the first to end."""

    config: RolloutConfig
    at_once: int
    _lost: int = 0
    _equal: Counter[float] = field(default_factory=Counter)
    """Reward -> consecutive groups whose chains all had this reward."""
    _figures: Counter[str] = field(default_factory=Counter)
    _endings: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Outcome, error) -> number of untrained chains in the consecutive lost groups that ended this way."""
    _chains: int = 0

    def judge(self, chains: Sequence[Trajectory], config: RolloutConfig | None = None) -> Worth:
        """Judge a complete group by its source's `config`; EQUAL only if `rollout.equal_rewards` filters such ones."""
        found = worth(chains, config or self.config)
        if found is Worth.EQUAL and self.config.equal_rewards is EqualRewards.KEEP:
            found = Worth.TEACHES
        if found is Worth.LOST:
            self._lost += 1
            self._chains += len(chains)
            self._endings.update(
                (chain.outcome.value, chain.error or "")
                for chain in chains
                if chain.reward is None or self.config.outcome_policy(chain.outcome) is not OutcomePolicy.KEEP
            )
            return found
        self._lost = self._chains = 0
        self._endings.clear()
        if found is Worth.TEACHES:
            self._equal.clear()
        else:
            self._figures["filtered/groups"] += 1
            reward = counted(chains, self.config)[0].reward
            assert reward is not None
            self._equal[reward] += 1
        return found

    def ended(self, chain: Trajectory) -> None:
        self._figures["chains"] += 1
        if not counted([chain], self.config):
            self._figures[f"filtered/{chain.outcome}"] += 1

    def no_hope(self) -> str | None:
        """Return the reason why further groups cannot be expected to have a training signal; None while they can."""
        if self._lost >= MAX_LOST_IN_A_ROW:
            return (
                f"{self._lost} groups in a row had fewer than two chains that count, or none that can be trained "
                f"(rollout.on_outcome); {commonest_ending(self._endings, self._chains)}"
            )
        equal = self._equal.total()
        if equal >= max(MAX_EQUAL_IN_A_ROW, 4 * self.at_once):
            most = ", ".join(f"{count} groups of reward {reward:g}" for reward, count in self._equal.most_common(3))
            return (
                f"{equal} groups in a row had chains of equal rewards ({most}): the tasks are too easy or too hard, or "
                "the reward does not distinguish chains; change data or rewards, or set rollout.equal_rewards=keep"
            )
        return None

    def take_figures(self) -> dict[str, float]:
        counts = sorted({"chains": 0, "filtered/groups": 0, **self._figures}.items())
        self._figures.clear()
        return {name: float(count) for name, count in counts}
