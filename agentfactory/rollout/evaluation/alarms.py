"""Alarms of a running training: advice that holds for so many groups in a row that it is no chance."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentfactory.rollout.config import EqualRewards
from agentfactory.rollout.evaluation.advice import ENOUGH_CHAINS, Advice, equal_rewards, missing_calls, slow_starts
from agentfactory.rollout.evaluation.equal_samples import are_equal, could_differ
from agentfactory.rollout.evaluation.first_look import Look, Offer, calls_tool, look_at
from agentfactory.rollout.groups.group_filter import Worth, worth
from agentfactory.rollout.trajectory import Group, Trajectory

GROUPS = 8
"""Minimum number of groups that an alarm covers; they have at least ENOUGH_CHAINS chains."""
EQUAL_BATCHES = 5
"""Number of batches whose groups all have equal rewards, as for the symptom no_gradient of `train.stop_when`."""


@dataclass
class _Streak:
    """Groups in a row with a sign of trouble. When there are enough of them, `judge` looks at them all."""

    has_sign: Callable[[Group], bool]
    judge: Callable[[Look], Iterator[Advice]]
    enough: int = GROUPS
    groups: list[Group] = field(default_factory=list)

    def note(self, group: Group, offer: Offer) -> list[Advice]:
        self.groups = [*self.groups, group] if self.has_sign(group) else []
        if len(self.groups) < self.enough or sum(len(one.trajectories) for one in self.groups) < ENOUGH_CHAINS:
            return []
        look, self.groups = look_at(self.groups, offer), []
        return list(self.judge(look))


class Alarms:
    """The alarms of a run whose batches have `batch_size` groups. Each is given once."""

    def __init__(self, offer: Offer, batch_size: int) -> None:
        self.offer = offer
        self._streaks: list[_Streak] = []
        if offer.specs:
            self._streaks.append(_Streak(_calls_nothing, missing_calls))
        # with KEEP, a step's metrics show it: symptom no_gradient
        if offer.config.equal_rewards is not EqualRewards.KEEP:
            self._streaks.append(_Streak(self._is_left_out, equal_rewards, max(GROUPS, EQUAL_BATCHES * batch_size)))
        self._streaks.append(_Streak(_samples_one_chain, _one_chain))
        if offer.why_wait:
            self._streaks.append(_Streak(lambda group: True, slow_starts))

    def note(self, group: Group) -> list[Advice]:
        """Take a complete group; return new alarms."""
        found = [(streak, streak.note(group, self.offer)) for streak in self._streaks]
        self._streaks = [streak for streak, advice in found if not advice]
        return [one for _, advice in found for one in advice]

    def _is_left_out(self, group: Group) -> bool:
        return worth(group.trajectories, self.offer.config) is Worth.EQUAL and not _solved(group.trajectories)


def _samples_one_chain(group: Group) -> bool:
    return could_differ(group.trajectories) and are_equal(group.trajectories)


def _one_chain(look: Look) -> Iterator[Advice]:
    text = f"in {look.groups} groups in a row all chains have the same sampled tokens"
    yield Advice("equal samples", text, "let the server draw: a temperature above 0, and another seed for each chain")


def _calls_nothing(group: Group) -> bool:
    # failed chains have warnings of their own
    ended = [chain for chain in group.trajectories if not chain.outcome.failed]
    return not _solved(ended) and not any(map(calls_tool, ended))


def _solved(chains: Sequence[Trajectory]) -> bool:
    return all(chain.metrics.get("success") == 1.0 for chain in chains)
