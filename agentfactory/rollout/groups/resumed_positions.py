"""The state that a stopped run left in its trajectories: places that are settled, and groups that wait to be
trained."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentfactory.rollout.config import EqualRewards, RolloutConfig
from agentfactory.rollout.data import Place
from agentfactory.rollout.groups.curriculum import successes
from agentfactory.rollout.groups.group_filter import Worth, counted, worth
from agentfactory.rollout.trajectory import Group, Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """A saved group that is not trained yet. `oldest` is the lowest possible version of its oldest token."""

    place: Place
    group: Group
    oldest: int | None


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes. Places that are `done` do not run again, so that each is trained at most once."""

    done: frozenset[int]
    """Positions that are settled: trained, filtered for equal rewards, or failed twice."""
    again: tuple[int, ...]
    """Positions whose first attempt failed; the second is due."""
    pending: tuple[Pending, ...]
    """Saved groups that wait to be trained, in the order of their places."""
    observed: tuple[tuple[int, list[float]], ...]
    """Observations for the curriculum, in the order in which the groups ended: position, and the successes of its
    chains."""

    @classmethod
    def from_saved(
        cls,
        saved: Iterable[Group],
        trained: Collection[str],
        versions: Mapping[str, int],
        version: int,
        config: RolloutConfig,
    ) -> "Resumed":
        """Classify the groups that were `saved` before the checkpoint.

        Args:
            saved: In the order of the file: each was written when it ended.
            trained: Ids of all groups that the checkpoint's weights were trained on.
            versions: Label of a span -> number of the version, as in WeightVersions. A group that was sampled with
                other weights is due again.
            version: The checkpoint's version.

        Raises:
            ValueError: a group's id is not a place.
        """
        done = {Place.of(group_id).position for group_id in trained}
        attempts: dict[int, int] = {}
        pending: dict[int, Pending] = {}
        observed: list[tuple[int, list[float]]] = []
        for group in saved:
            place = Place.of(group.id)
            attempts[place.position] = max(place.attempt, attempts.get(place.position, 0))
            counting = counted(group.trajectories, config)
            if config.curriculum is not None:
                observed.append((place.position, successes(counting)))
            if place.position in done:
                continue
            # if there is a second attempt, the first had been given up
            pending.pop(place.position, None)
            left = Group(group.id, group.task, counting, group.version)
            if unproven := _labels(left) - versions.keys():
                # the run was stopped after a server had taken these weights and before it had proven them
                logger.warning("group %s is run again: no checkpoint names %s", group.id, ", ".join(sorted(unproven)))
                continue
            whole = all(chain.outcome is not Outcome.CANCELLED for chain in group.trajectories)
            found = worth(group.trajectories, config)
            if found is Worth.EQUAL and whole and config.equal_rewards is not EqualRewards.KEEP:
                done.add(place.position)
            elif found is Worth.TEACHES or (found is Worth.EQUAL and whole):
                oldest = min((versions[label] for label in _labels(left)), default=None)
                if oldest is None or version - oldest <= config.max_staleness:
                    pending[place.position] = Pending(place, left, oldest)
        given_up = sorted(set(attempts) - done - set(pending))
        return cls(
            done=frozenset(done | {position for position in given_up if attempts[position]}),
            again=tuple(position for position in given_up if not attempts[position]),
            pending=tuple(pending[position] for position in sorted(pending)),
            observed=tuple(observed),
        )


def _labels(group: Group) -> set[str]:
    return {span.version for chain in group.trajectories for row in chain.rows for span in row.versions}
