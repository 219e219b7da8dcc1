"""Rows, and the turns in them."""

import numpy as np
import pytest

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Activity, Group, Outcome, Stretch, Trajectory


def example() -> Group:
    row = Row()
    row.append_context([1, 2, 3])
    row.append_sampled([4, 5], [-0.5, -0.25], [Span("3", 0, 1), Span("4", 1, 2)])
    row.append_context([6])
    row.append_sampled([7], [-1.0], [Span("4", 0, 1)])
    chain = Trajectory("g0.0", [{"role": "user", "content": "é"}], [row], Outcome.COMPLETED, 0.5, {"success": 1.0}, 2)
    chain.turn_rewards = [0.0, 0.25]
    chain.timeline = [Stretch(Activity.MODEL, 0.0, 0.5, 0), Stretch(Activity.SETUP, 0.0, 0.1)]
    return Group("g0", {"question": "é"}, [chain], version=3)


def test_streams_stay_aligned() -> None:
    row = example().trajectories[0].rows[0]
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.mask == [0, 0, 0, 1, 1, 0, 1]
    assert row.logprobs == [0, 0, 0, -0.5, -0.25, 0, -1.0]
    assert row.versions == [Span("3", 3, 4), Span("4", 4, 5), Span("4", 6, 7)]
    with pytest.raises(ValueError, match="2 sampled tokens came with 1"):
        row.append_sampled([1, 2], [0.0], [])


def test_turns_are_found_in_the_rows() -> None:
    chain = example().trajectories[0]
    assert chain.turn_spans() == [(0, 3, 5), (0, 6, 7)]
    forked = Row()
    forked.append_context([1, 2])
    forked.append_sampled([4, 5, 6], [0.0] * 3, [Span("4", 0, 2), Span("5", 2, 3)])
    chain.rows.append(forked)
    chain.turns = 3
    assert chain.turn_spans() == [(0, 3, 5), (0, 6, 7), (1, 2, 5)], "versions may change within a turn"
    forked.append_context([7])
    forked.append_sampled([], [], [])
    chain.turns = 4
    assert chain.turn_spans() == [(0, 3, 5), (0, 6, 7), (1, 2, 5), (1, 6, 6)], "the last turn said nothing"
    forked.append_sampled([8, 9, 10, 11], [0.0, -1.0, 0.0, -1.0], [Span("5", 1, 2), Span("5", 3, 4)], [0, 1, 0, 1])
    chain.turns = 5
    assert chain.turn_spans()[-1] == (1, 7, 10), "from its first sampled token, with what was put into it"
    assert forked.mask[-4:] == [0, 1, 0, 1]
    assert forked.versions[-2:] == [Span("5", 7, 8), Span("5", 9, 10)]


def test_turns_are_found_in_rows_that_did_not_note_their_ends() -> None:
    row = Row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0.0] * 5)
    chain = Trajectory("c", [], [row], Outcome.COMPLETED, turns=2)
    assert chain.turn_spans() == [(0, 1, 3), (0, 4, 5)]
    row.append_context([6])
    chain.turns = 3
    assert chain.turn_spans() == [(0, 1, 3), (0, 4, 5), (0, 6, 6)], "the last turn said nothing"
    assert Trajectory("c", [], [], Outcome.TOOL_INFRASTRUCTURE).turn_spans() == []


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_rows_that_do_not_hold_the_turns_are_refused(turns: int) -> None:
    chain = example().trajectories[0]
    chain.turns = turns
    with pytest.raises(ValueError, match=f"chain g0.0 has {turns} turns, but its rows contain 2"):
        chain.turn_spans()


def test_the_turns_of_arrays_are_those_of_lists() -> None:
    row = Row([1] * 6, [0, 1, 1, 0, 0, 1], [0.0] * 6)
    for turn_ends, spans in ((None, [(1, 3), (5, 6)]), ([3, 5, 6], [(1, 3), (5, 5), (5, 6)])):
        row.turn_ends = turn_ends
        assert row.turn_spans() == spans
        assert Row(row.token_ids, np.array(row.mask, dtype=bool), turn_ends=turn_ends).turn_spans() == spans
