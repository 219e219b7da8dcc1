"""Rows and their JSONL."""

import json
from pathlib import Path

import pytest

from rollout.trajectory import Group, Outcome, Row, Span, Trajectory, read_groups


def example() -> Group:
    row = Row()
    row.append_context([1, 2, 3])
    row.append_sampled([4, 5], [-0.5, -0.25], [Span("3", 0, 1), Span("4", 1, 2)])
    row.append_context([6])
    row.append_sampled([7], [-1.0], [Span("4", 0, 1)])
    chain = Trajectory("g0.0", [{"role": "user", "content": "é"}], [row], Outcome.COMPLETED, 0.5, {"success": 1.0}, 2)
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


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(example().to_json() + "\n" + json.dumps({"id": 1}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not a saved group"):
        list(read_groups(tmp_path))


def test_failures_are_typed() -> None:
    assert {o for o in Outcome if o.failed} == {
        Outcome.TOOL_INFRASTRUCTURE,
        Outcome.INFERENCE_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.TIMEOUT,
        Outcome.CANCELLED,
    }
