"""Resuming from a stopped run's saved groups: each place is settled, due again or pending."""

from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from agentfactory.rollout.config import CurriculumConfig, RolloutConfig
from agentfactory.rollout.data import Share, TaskMix, TaskOrder
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.groups.producer import GroupProducer, OpenGroup
from agentfactory.rollout.groups.resumed_positions import Resumed
from agentfactory.rollout.groups.staleness import Admission
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

VERSIONS = {"5": 5, "6": 6, "7": 7, "8": 8}


def chain(reward: float | None, label: str = "8", outcome: Outcome | None = None) -> Trajectory:
    row = Row()
    row.append_context([1])
    row.append_sampled([2], [-1.0], [Span(label, 0, 1)])
    ended = outcome or (Outcome.COMPLETED if reward is not None else Outcome.INFERENCE_ERROR)
    return Trajectory("c", [], [row], ended, reward, {"success": reward or 0.0}, turns=1)


def group(name: str, *chains: Trajectory) -> Group:
    return Group(name, {"question": name}, list(chains), version=6)


def sort_out(saved: list[Group], trained: set[str] = frozenset(), **rollout: Any) -> Resumed:  # type: ignore[assignment]
    config = RolloutConfig.model_validate({"max_staleness": 2, **rollout})
    return Resumed.from_saved(saved, trained, VERSIONS, 8, config)


WON, LOST, BROKEN = chain(1.0), chain(0.0), chain(None)
CANCELLED = chain(None, "5", Outcome.CANCELLED)


def test_trained_groups_are_done_and_whole_ones_pending() -> None:
    saved = [group("g000002", WON, chain(0.0, "7"), BROKEN), group("g000000", WON, LOST), group("g000001", WON, WON)]
    found = sort_out(saved, {"g000000"})
    assert found.done == {0}
    assert found.again == ()
    assert [(pending.group.id, pending.oldest) for pending in found.pending] == [("g000001", 8), ("g000002", 7)]
    assert found.pending[1].group.trajectories == [WON, chain(0.0, "7")], "with the chains that count"
    assert found.pending[1].group.task == {"question": "g000002"}
    assert found.pending[1].group.version == 6


def test_what_came_to_nothing_is_due_again_once() -> None:
    names = ["0", "1", "1-1", "2", "2-1", "3", "3-1"]
    saved = [group(f"g00000{name}", WON, LOST if name in ("2-1", "3-1") else BROKEN) for name in names]
    found = sort_out(saved, {"g000003-1"})
    assert found.done == {1, 3}
    assert found.again == (0,)
    assert [pending.group.id for pending in found.pending] == ["g000002-1"]


def test_groups_that_were_closed_early() -> None:
    """Groups with differing chains were taken by a batch that may be untrained; others were cancelled."""
    found = sort_out([group("g000000", WON, LOST, CANCELLED), group("g000001", WON, WON, CANCELLED)])
    assert [pending.group.trajectories for pending in found.pending] == [[WON, LOST]]
    assert found.pending[0].oldest == 8, "the age of what was cancelled does not matter"
    assert found.again == (1,)
    # a complete group without a place in a batch, whose second attempt was running or has ended
    saved = [group("g000000", WON, LOST), group("g000000-1", WON, CANCELLED)]
    assert sort_out(saved).done == {0}


@pytest.mark.parametrize("policy", ["drop", "refill"])
def test_what_was_filtered_is_not_run_again(policy: str) -> None:
    saved = [group("g000000", WON, WON), group("g000001", WON, LOST), group("g000002", WON, WON, CANCELLED)]
    found = sort_out(saved, equal_rewards=policy)
    assert found.done == {0}
    assert [pending.group.id for pending in found.pending] == ["g000001"]
    assert found.again == (2,), "who knows what the cancelled one would have earned"


def test_what_is_too_old_by_now_is_due_again() -> None:
    saved = [group("g000000", WON, chain(0.0, "6")), group("g000001", WON, chain(0.0, "5"))]
    found = sort_out(saved)
    assert [pending.oldest for pending in found.pending] == [6]
    assert found.again == (1,)


def test_what_was_sampled_with_weights_that_were_never_proven_is_due_again() -> None:
    old = chain(0.0, "9")
    saved = [group("g000000", WON, old), group("g000001", WON, LOST), group("g000002", WON, chain(1.0, "9"))]
    found = sort_out(saved, equal_rewards="drop")
    assert found.again == (0, 2)
    assert [pending.group.id for pending in found.pending] == ["g000001"]
    assert sort_out(saved, {"g000000"}).done == {0}


def test_observations_are_replayed_with_a_curriculum() -> None:
    saved = [group("g000003", WON, LOST, BROKEN), group("g000000", WON, WON), group("g000003-1", BROKEN, BROKEN)]
    assert sort_out(saved).observed == ()
    assert sort_out(saved, curriculum={}).observed == ((3, [1.0, 0.0]), (0, [1.0, 1.0]), (3, []))


def test_what_does_not_belong_to_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="'sampled-00000' is not the id of a group"):
        sort_out([group("sampled-00000", WON, LOST)])


class Simulated:
    """A producer of groups of one chain over two sources, of which 8 are always in progress. Chains of the first source
    fail until group `hope`; those of the second succeed every other time."""

    def __init__(self, file: Path, share: Share, hope: int, saved: list[Group] = (), **curricula: Any) -> None:  # type: ignore[assignment]
        told = RolloutConfig.model_validate({"group_size": 1, "curriculum": curricula.get("curriculum")})
        orders = [TaskOrder([{"question": str(row)} for row in range(5)], seed, shuffle=True) for seed in (1, 2)]
        resumed, mixing = None, curricula.get("mixing")
        if saved:
            trained = {group.id for group in saved}
            resumed = Resumed.from_saved(saved, trained, VERSIONS, 8, told, mixing is not None, share)
        self.hope = hope
        order, admission = TaskMix(orders, [1.0, 1.0], seed=0), Admission(1, 0, total=10_000)
        newest, deliver = Published(8, "8", "8"), AsyncMock()
        self.producer = GroupProducer(told, [], order, admission, newest, file, deliver, resumed, share, mixing=mixing)
        self.open: deque[OpenGroup] = deque()

    def play(self, groups: int) -> list[int]:
        begun = []
        while True:
            while len(self.open) < 8:
                place = self.producer._take_place()
                self.open.append(OpenGroup(place, {}, 8, 1))
                begun.append(place.position)
            if not groups:
                return begun
            groups -= 1
            group = self.open.popleft()
            position = group.place.position
            source = self.producer.order.source(position)
            won = position % 2 if source else float(position >= self.hope)
            group.chains = [chain(float(won))]
            group.end(0)
            self.producer._save(group)


@pytest.mark.parametrize("curricula", [{"mixing": CurriculumConfig()}, {"curriculum": CurriculumConfig()}])
@pytest.mark.parametrize("of", [1, 2])
@pytest.mark.parametrize("killed", [1, 50, 97, 200])
def test_a_killed_run_with_a_curriculum_visits_what_it_would_have_visited(
    tmp_path: Path, curricula: dict[str, CurriculumConfig], of: int, killed: int
) -> None:
    """Between a kill and its end, places that were passed over are not judged again by what was learned since."""
    for number in range(of):
        whole = Simulated(tmp_path / f"train-{number}.jsonl", Share(number, of), 150, **curricula)
        before = whole.play(killed)
        saved = list(read_groups(tmp_path / f"train-{number}.jsonl"))
        expected = [*before[killed:], *whole.play(64)]
        again = Simulated(tmp_path / f"again-{number}.jsonl", Share(number, of), 150, saved, **curricula)
        assert again.play(64) == expected
        sources = {again.producer.order.source(position) for position in expected}
        assert sources == {0, 1}
