"""Rows and their JSONL."""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.rollout.trajectory import Activity, Group, Outcome, Row, Span, Stretch, Trajectory, read_groups


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


def test_groups_survive_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(example().to_json() + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(example().to_json() + "\n", encoding="utf-8")
    assert list(read_groups(tmp_path)) == [example(), example()]


def test_lines_from_before_there_were_turn_rewards_and_times_are_read(tmp_path: Path) -> None:
    older = json.loads(example().to_json())
    del older["trajectories"][0]["turn_rewards"], older["trajectories"][0]["timeline"]
    (tmp_path / "a.jsonl").write_text(json.dumps(older) + "\n")
    (group,) = read_groups(tmp_path / "a.jsonl")
    assert group.trajectories[0].turn_rewards is None
    assert group.trajectories[0].timeline == []
    assert group.trajectories[0].rows == example().trajectories[0].rows


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
    with pytest.raises(ValueError, match=f"chain g0.0 has {turns} turns, and its rows hold 2"):
        chain.turn_spans()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(example().to_json() + "\n" + json.dumps({"id": 1}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not a saved group"):
        list(read_groups(tmp_path))


def test_a_group_keeps_what_datasets_and_models_write(tmp_path: Path) -> None:
    task = {"n": 10**40, "where": {"x": (1, 2)}, "text": "\u2028\U0001f600", "when": datetime(2026, 1, 2)}
    chain = Trajectory("g.0", [{"content": None}], [Row([1])], Outcome.COMPLETED, metrics={"m": np.float64(0.1)})
    group = Group("g", task, [chain])
    (tmp_path / "a.jsonl").write_text(group.to_json() + "\n", encoding="utf-8")
    task |= {"where": {"x": [1, 2]}, "when": "2026-01-02T00:00:00"}
    assert list(read_groups(tmp_path / "a.jsonl")) == [group]
    assert Group.from_json(group.to_json()) == group


def test_a_saved_task_with_nan_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "g", "task": {"x": NaN}, "trajectories": []}\n')
    (group,) = read_groups(tmp_path / "a.jsonl")
    assert math.isnan(group.task["x"])


def test_failures_are_typed() -> None:
    assert {o for o in Outcome if o.failed} == {
        Outcome.TOOL_INFRASTRUCTURE,
        Outcome.INFERENCE_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.TIMEOUT,
        Outcome.CANCELLED,
    }


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"reward": float("nan")}, r"chain g\.0 has the reward nan, which is no finite number"),
        ({"turn_rewards": [1.0, float("inf")]}, r"chain g\.0 has the reward inf, which is no finite number"),
        ({"reward": "1"}, r"Expected `float \| null`, got `str` - at `\$\.trajectories\[0\]\.reward`"),
    ],
)
def test_a_saved_reward_that_is_no_number_is_refused(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    group = Group("g", {}, [Trajectory("g.0", [], [], Outcome.COMPLETED, 1.0)])
    saved = json.loads(group.to_json())
    saved["trajectories"][0] |= wrong
    (tmp_path / "a.jsonl").write_text(group.to_json() + "\n" + json.dumps(saved) + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl:2 is not a saved group: .*{problem}"):
        list(read_groups(tmp_path / "a.jsonl"))
