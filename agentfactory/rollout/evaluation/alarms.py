"""Alarms of a running training: advice that holds for so many groups in a row that it is no chance."""

from collections.abc import Iterator, Sequence

from agentfactory.rollout.config import EqualRewards
from agentfactory.rollout.evaluation.advice import ENOUGH_CHAINS, Advice, equal_rewards, missing_calls, slow_starts
from agentfactory.rollout.evaluation.first_look import Offer, calls_tool, look_at
from agentfactory.rollout.groups.group_filter import Worth, worth
from agentfactory.rollout.trajectory import Group, Trajectory

GROUPS = 8
"""Minimum number of groups that an alarm covers."""
EQUAL_BATCHES = 5
"""Number of batches whose groups all have equal rewards, as for the symptom no_gradient of `train.stop_when`."""


class Alarms:
    """The alarms of a run whose batches have `batch_size` groups. Each is given once."""

    def __init__(self, offer: Offer, batch_size: int) -> None:
        self.offer = offer
        self._enough = max(GROUPS, -(-ENOUGH_CHAINS // offer.config.group_size))
        self._most_equal = max(GROUPS, EQUAL_BATCHES * batch_size)
        self._without_call: list[Group] | None = []
        """The groups since the last call of a tool; None once that alarm was given, or need not be."""
        self._equal: list[Group] | None = []
        """The groups that were left out in a row, because their rewards are equal."""
        self._recent: list[Group] = []
        self._told: set[str] = set()
        if not offer.specs:
            self._without_call = None
        # a step's metrics show it: symptom no_gradient
        if offer.config.equal_rewards is EqualRewards.KEEP:
            self._equal = None

    def note(self, group: Group) -> list[Advice]:
        """Take a complete group; return new alarms."""
        advice = [*self._no_call(group), *self._one_reward(group), *self._slow_starts(group)]
        new = [one for one in advice if one.topic not in self._told]
        self._told |= {one.topic for one in new}
        return new

    def _no_call(self, group: Group) -> Iterator[Advice]:
        if self._without_call is None:
            return
        if any(map(calls_tool, group.trajectories)):
            self._without_call = []
            return
        self._without_call.append(group)
        if len(self._without_call) == self._enough:
            yield from missing_calls(look_at(self._without_call, self.offer))
            self._without_call = None

    def _one_reward(self, group: Group) -> Iterator[Advice]:
        if self._equal is None:
            return
        if worth(group.trajectories, self.offer.config) is not Worth.EQUAL or _solved(group.trajectories):
            self._equal = []
            return
        self._equal.append(group)
        if len(self._equal) == self._most_equal:
            yield from equal_rewards(look_at(self._equal, self.offer))
            self._equal = None

    def _slow_starts(self, group: Group) -> Iterator[Advice]:
        if not self.offer.why_wait:
            return
        self._recent.append(group)
        if len(self._recent) == self._enough:
            yield from slow_starts(look_at(self._recent, self.offer))
            self._recent = []


def _solved(chains: Sequence[Trajectory]) -> bool:
    return all(chain.metrics.get("success") == 1.0 for chain in chains)
