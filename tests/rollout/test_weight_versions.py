"""Ages of tokens by their spans' labels, and the count of chains ended by the staleness bound."""

import pytest

from agentfactory.rollout.inference.weight_versions import Cancellations, Published, WeightVersions
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory


def chain(*labels: str, turn: int = 2) -> Trajectory:
    row = Row()
    row.append_context([1, 2, 3])
    for label in labels:
        row.append_sampled([4] * turn, [-1.0] * turn, [Span(label, 0, turn)])
    return Trajectory("c", [], [row], Outcome.COMPLETED, 1.0)


def test_ages_are_counted_by_token() -> None:
    versions = WeightVersions()
    for version in range(4):
        versions.note(Published(version, "policy", str(version)))
    groups = [Group("a", {}, [chain("0", "1"), chain("3")]), Group("b", {}, [chain("3", turn=5)])]
    assert versions.ages(groups, version=3) == {3: 2, 2: 2, 0: 7}


def test_adapters_are_known_by_name() -> None:
    versions = WeightVersions()
    versions.note(Published(7, "run-1-v7", "run-1-v7"))
    versions.note(Published(8, "run-1-v8-2", "run-1-v8-2"))
    assert [versions.number(name) for name in ("run-1-v7", "run-1-v8-2")] == [7, 8]
    with pytest.raises(ValueError, match="weights called 'default', which this run never published"):
        versions.ages([Group("a", {}, [chain("default")])], version=8)


def test_a_task_that_is_cancelled_each_time_is_found() -> None:
    counts = Cancellations()
    assert counts.lost(5, [chain("0"), chain("0", "0")]) == [5, 7]
    assert not counts.cancelled(5), "once may be chance"
    assert counts.cancelled(5)
    counts.trained(6)
    assert not counts.cancelled(6)
    assert not counts.cancelled(6), "a task that gets through at times is not hopeless"
    assert counts.lengths[5] == [5, 7]
    assert counts.take_figures() == {"cancelled/groups": 4, "cancelled/chains": 2, "cancelled/tokens": 12}
    assert counts.take_figures()["cancelled/groups"] == 0


def test_which_tokens_may_be_trained_follows_from_their_spans() -> None:
    versions = WeightVersions({str(number): number for number in range(4)})
    row = chain("0", "1", "3").rows[0]
    row.append_context([5])
    assert versions.fresh(row, 3, most=3).all()
    assert versions.fresh(row, 3, most=2).tolist() == [True] * 3 + [False] * 2 + [True] * 5
    assert versions.fresh(row, 3, most=0).tolist() == [True] * 3 + [False] * 4 + [True] * 3
