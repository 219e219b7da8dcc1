"""The state of a stopped run, from its trajectories: settled places, and groups that wait to be trained."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentfactory.rollout.config import EqualRewards, LateChains, RolloutConfig
from agentfactory.rollout.data import WHOLE, Place, Share
from agentfactory.rollout.groups.curriculum import successes
from agentfactory.rollout.groups.group_filter import Worth, counted, worth
from agentfactory.rollout.trajectory import Group, Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """A saved group that is not trained yet. `oldest` is the lowest version of its tokens (None: it has none)."""

    place: Place
    group: Group
    oldest: int | None


@dataclass(frozen=True)
class Resumed:
    """The positions at which a run resumes. `done` positions do not run again, so that each is trained at most once."""

    done: frozenset[int]
    """Settled positions: trained, filtered for equal rewards, or failed twice."""
    again: tuple[int, ...]
    """Positions whose first attempt failed and whose second attempt is due."""
    pending: tuple[Pending, ...]
    """Saved groups that wait to be trained, in the order of their places."""
    observed: tuple[tuple[int, list[float]], ...]
    """Observations for the curriculum, ordered by the ends of the groups: position, and the successes of its chains."""
    passed: frozenset[int] = frozenset()
    """Positions that the curriculum passed over. It must not judge them again: it knows more now."""
    judged: int = 0
    """The position up to which the curriculum had judged. Those below it that it did not pass over had begun."""

    @classmethod
    def from_saved(
        cls,
        saved: Iterable[Group],
        trained: Collection[str],
        versions: Mapping[str, int],
        version: int,
        config: RolloutConfig,
        observes: bool = False,
        share: Share = WHOLE,
        configs: Mapping[str, RolloutConfig] | None = None,
    ) -> "Resumed":
        """Classify the groups that were `saved` before the checkpoint, in the order of their ends.

        `trained` are the ids of all groups on which the checkpoint's weights, of number `version`, were trained.
        `versions` maps labels of spans to numbers, as in WeightVersions; a group with other labels is run again.
        `observes`: a curriculum over sources needs the observations. `share` are the positions to classify, of those
        that all workers saved. `configs` are the settings of sources that have their own.

        Raise ValueError if a group's id does not contain a place."""
        done = {position for group_id in trained if (position := Place.of(group_id).position) in share}
        passed: set[int] = set()
        judged = 0
        attempts: dict[int, int] = {}
        pending: dict[int, Pending] = {}
        observed: list[tuple[int, list[float]]] = []
        for group in saved:
            place = Place.of(group.id)
            if group.judged is not None:
                passed.update(group.judged.passed)
                judged = max(judged, group.judged.upto)
            if place.position not in share:
                continue
            attempts[place.position] = max(place.attempt, attempts.get(place.position, 0))
            counting = counted(group.trajectories, config)
            if observes or config.curriculum is not None:
                observed.append((place.position, successes(counting)))
            if place.position in done:
                continue
            # a second attempt means that the first was given up
            pending.pop(place.position, None)
            left = Group(group.id, group.task, counting, group.version, group.source)
            if unproven := _labels(left) - versions.keys():
                # the run stopped after a server had loaded these weights but before it had proven them
                logger.warning("group %s runs again: no checkpoint has %s", group.id, ", ".join(sorted(unproven)))
                continue
            whole = all(chain.outcome is not Outcome.CANCELLED for chain in group.trajectories)
            found = worth(group.trajectories, (configs or {}).get(group.source, config))
            if found is Worth.EQUAL and whole and config.equal_rewards is not EqualRewards.KEEP:
                done.add(place.position)
            elif found is Worth.TEACHES or (found is Worth.EQUAL and whole):
                numbers = [versions[label] for label in _labels(left)]
                oldest = min(numbers, default=None)
                decides = max(numbers, default=None) if config.late_chains is LateChains.BASELINE else oldest
                if decides is None or version - decides <= config.max_staleness:
                    pending[place.position] = Pending(place, left, oldest)
        given_up = sorted(set(attempts) - done - set(pending))
        return cls(
            done=frozenset(done | {position for position in given_up if attempts[position]}),
            again=tuple(position for position in given_up if not attempts[position]),
            pending=tuple(pending[position] for position in sorted(pending)),
            observed=tuple(observed),
            passed=frozenset(passed),
            judged=judged,
        )


def _labels(group: Group) -> set[str]:
    return {span.version for chain in group.trajectories for row in chain.rows for span in row.versions}
