"""Which groups teach: a pure judgement of a group's chains, and the count of what is left out.

Advantages compare the chains of a group. A group teaches where at least two of its chains count (they are scored, see
OutcomePolicy), at least one of them is trained and not only compared with, and their rewards differ.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentfactory.rollout.config import EqualRewards, OutcomePolicy, RolloutConfig
from agentfactory.rollout.trajectory import Trajectory

MAX_LOST_IN_A_ROW = 64
"""Groups lost one after another before the run stops: by then it is not chance."""
MAX_EQUAL_IN_A_ROW = 256
"""The same of groups with equal rewards, which are common where tasks are hard: where one chain in a hundred succeeds,
23 of 25 groups of 8 are."""


class Worth(StrEnum):
    """What a group teaches."""

    TEACHES = "teaches"
    EQUAL = "equal"
    """All its chains have the same rewards, of their turns too: whoever compares them learns nothing."""
    LOST = "lost"
    """Fewer than two of its chains count (fewer than one, where groups have one chain), or none is trained."""


def counted(chains: Sequence[Trajectory], config: RolloutConfig) -> list[Trajectory]:
    """The chains that baselines see: scored, and `rollout.on_outcome` keeps or masks how they ended."""
    return [chain for chain in chains if chain.reward is not None and config.outcome_policy(chain.outcome).scored]


def worth(chains: Sequence[Trajectory], config: RolloutConfig) -> Worth:
    """What a group of these chains teaches."""
    counting = counted(chains, config)
    trained = any(config.outcome_policy(chain.outcome) is OutcomePolicy.KEEP for chain in counting)
    if len(counting) < min(2, config.group_size) or not trained:
        return Worth.LOST
    differ = len({(chain.reward, *(chain.turn_rewards or ())) for chain in counting}) > 1
    return Worth.TEACHES if differ else Worth.EQUAL


def commonest_ending(endings: Counter[tuple[str, str]], chains: int) -> str:
    """How most of `endings`, (outcome, error) of some of so many `chains`, came about, with the commonest error."""
    outcomes: Counter[str] = Counter()
    for (outcome, _), count in endings.items():
        outcomes[outcome] += count
    [(most, ended)] = outcomes.most_common(1)
    error = max((found for found in endings if found[0] == most), key=endings.__getitem__)[1]
    line = " ".join(error.split())
    # an error may hold a page that a server sent
    such = f", such as: {line if len(line) <= 300 else line[:297] + '...'}" if line else ""
    return f"{ended} of {chains} chains ended as {most}{such}"


@dataclass
class GroupFilter:
    """Judges complete groups by the recipe, counts those that are left out, and knows when there is no hope.

    `at_once` is the number of groups that may be open at a time: those of equal rewards are often the first to end.
    """

    config: RolloutConfig
    at_once: int
    _lost: int = 0
    _equal: Counter[float] = field(default_factory=Counter)
    """Reward -> groups in a row that had no other."""
    _figures: Counter[str] = field(default_factory=Counter)
    _endings: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Outcome, error) -> chains of the lost groups in a row that ended so and are not trained."""
    _chains: int = 0
    """All chains of those groups."""

    def judge(self, chains: Sequence[Trajectory]) -> Worth:
        """What is to become of a complete group: TEACHES, so that it is trained; LOST; or EQUAL, where
        `rollout.equal_rewards` leaves it out."""
        found = worth(chains, self.config)
        if found is Worth.EQUAL and self.config.equal_rewards is EqualRewards.KEEP:
            found = Worth.TEACHES
        match found:
            case Worth.LOST:
                self._note_lost(chains)
            case Worth.EQUAL:
                self._forget_lost()
                self._figures["filtered/groups"] += 1
                reward = counted(chains, self.config)[0].reward
                assert reward is not None
                self._equal[reward] += 1
            case Worth.TEACHES:
                self._forget_lost()
                self._equal.clear()
        return found

    def _note_lost(self, chains: Sequence[Trajectory]) -> None:
        self._lost += 1
        self._chains += len(chains)
        self._endings.update(
            (chain.outcome.value, chain.error or "")
            for chain in chains
            if chain.reward is None or self.config.outcome_policy(chain.outcome) is not OutcomePolicy.KEEP
        )

    def _forget_lost(self) -> None:
        self._lost = self._chains = 0
        self._endings.clear()

    def ended(self, chain: Trajectory) -> None:
        """A chain of a group ended."""
        if not counted([chain], self.config):
            self._figures[f"filtered/{chain.outcome}"] += 1

    def no_hope(self) -> str | None:
        """Why nothing can be expected of further groups; None while something can."""
        if self._lost >= MAX_LOST_IN_A_ROW:
            return (
                f"{self._lost} groups in a row had fewer than two chains that count, or none that may be trained "
                f"(rollout.on_outcome); {commonest_ending(self._endings, self._chains)}"
            )
        equal = self._equal.total()
        if equal >= max(MAX_EQUAL_IN_A_ROW, 4 * self.at_once):
            most = ", ".join(f"{count} groups of reward {reward:g}" for reward, count in self._equal.most_common(3))
            return (
                f"{equal} groups in a row had chains of equal rewards ({most}): the tasks are too easy or too hard, or "
                "the reward does not tell chains apart; change data or rewards, or set rollout.equal_rewards=keep"
            )
        return None

    def take_figures(self) -> dict[str, float]:
        """The counts since the last call, by metric name."""
        figures = {"filtered/groups": 0.0, **{name: float(count) for name, count in sorted(self._figures.items())}}
        self._figures.clear()
        return figures
