"""Group files: human-readable lines, with their arrays in a separate file."""

import json
import math
import os
import re
import struct
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfactory.base.files.disk import DiskError
from agentfactory.rollout.groups.group_files import append_group, arrays_file, decode_group, encode_group, read_groups
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.batches.batch import training_row
from tests.saved_groups import old_line, write_groups

OLD = (
    '{"id": "g000000", "task": {"question": "é\u2028", "x": NaN}, "trajectories": [{"id": "g000000.0", "messages": '
    '[{"role": "user", "content": "é"}], "rows": [{"token_ids": [151644, 7, 5], "mask": [0, 1, 1], "logprobs": [0.0, '
    '-0.1, -1e-07], "versions": [{"version": "grpo-v0", "start": 1, "end": 3, "mixed": false}], "weights": null, '
    '"turn_ends": [3], "roles": ".ft"}], "outcome": "completed", "reward": 1.0, "metrics": {"success": 1.0}, "turns": '
    '1, "seconds": 0.5, "error": null, "turn_rewards": null, "stop_reason": "answer", "malformed_turns": [], '
    '"timeline": [{"activity": "model", "start": 0.0, "end": 0.5, "turn": 0, "name": ""}]}], "version": 0}\n'
)
"""A line of version 0.1."""


def row(*ids: int, **fields: Any) -> Row:
    """A row with log-probabilities as in a server's JSON, which are not exact float32 values."""
    made = Row(roles="." + "t" * len(ids), **fields)
    made.append_context([99])
    made.append_sampled(list(ids), [-1 / (i + 3) for i in ids], [Span("v1", 0, len(ids))])
    if made.weights is not None:
        made.weights += [0.0, *[0.1] * len(ids)]
    return made


def group(name: str = "g") -> Group:
    rows: list[list[Row]] = [[], [row(150_000, 7), row(8)], [row(3, 4, 5, weights=[])], [Row()]]
    said = [{"role": "user", "content": "é"}]
    chains = [Trajectory(f"{name}.{n}", said, r, Outcome.COMPLETED) for n, r in enumerate(rows)]
    return Group(name, {"question": "é"}, chains, version=3)


def saved_with(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "a.jsonl"
    write_groups(path, [group()])
    line = json.loads(path.read_text())
    change(line)
    path.write_text(json.dumps(line) + "\n")
    return path


def rows_of(groups: list[Group]) -> list[Row]:
    return [row for group in groups for chain in group.trajectories for row in chain.rows]


def same_as_float32(saved: Group, made: Group) -> bool:
    """Return True if everything is equal after log-probabilities are rounded to float32."""
    for one in rows_of([made]):
        one.logprobs = np.array(one.logprobs, dtype=np.float32)
    return saved == made


def test_groups_survive_their_files_as_arrays(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.jsonl", [group("g0"), Group("empty", {}, []), group("g1")])
    write_groups(tmp_path / "b.jsonl", [group("g2")])
    (tmp_path / "credit.jsonl").write_text("{}\n")
    saved = list(read_groups(str(tmp_path)))
    assert [one.id for one in saved] == ["g0", "empty", "g1", "g2"]
    assert all(same_as_float32(one, group(one.id)) for one in (saved[0], saved[2], saved[3]))
    kinds = {"token_ids": np.int32, "mask": np.bool_, "logprobs": np.float32}
    assert all(getattr(one, name).dtype == kind for one in rows_of(saved) for name, kind in kinds.items())


def test_what_utf8_cannot_express_is_replaced(tmp_path: Path) -> None:
    said = group("g")
    said.trajectories[0].messages = [{"role": "user", "content": "\ud800 é"}]
    said.trajectories[1].error = "no \udfff plan"
    append_group(tmp_path / "a.jsonl", said)
    (saved,) = read_groups(str(tmp_path / "a.jsonl"))
    assert (saved.trajectories[0].messages[0]["content"], saved.trajectories[1].error) == ("? é", "no ? plan")
    assert rows_of([saved])[0].token_ids.tolist() == [99, 150_000, 7]  # type: ignore[attr-defined]


def test_the_trainer_gets_the_same_bits(tmp_path: Path) -> None:
    made = group()
    append_group(tmp_path / "new.jsonl", made)
    (tmp_path / "old.jsonl").write_text(old_line(made) + "\n")
    encoded = encode_group(made)
    groups = [*read_groups(tmp_path / "new.jsonl"), *read_groups(tmp_path / "old.jsonl")]
    groups += [decode_group(encoded.line, encoded.record)]
    given = [training_row(one) for one in rows_of([made])]
    for taken in groups:
        for mine, theirs in zip(given, map(training_row, rows_of([taken])), strict=True):
            if mine is None or theirs is None:
                assert mine is theirs
                continue
            assert np.array_equal(mine.token_ids, theirs.token_ids)
            assert mine.token_ids.dtype == theirs.token_ids.dtype == np.int64
            assert np.array_equal(mine.targets, theirs.targets)
            assert mine.streams.keys() == theirs.streams.keys()
            for name, values in mine.streams.items():
                # the contents of micro-batches
                assert values.astype(np.float32).tobytes() == theirs.streams[name].astype(np.float32).tobytes(), name


def test_float32_is_rounded_as_numpy_rounds() -> None:
    values = [-0.1, -1e-45, -3.4e38, 0.0, -0.0, 1 / 3, -math.inf, np.float64(-0.7), np.float32(-0.3), -2]
    made = Group("g", {}, [Trajectory("g.0", [], [Row([1] * 10, [0] * 10, values)], Outcome.COMPLETED)])
    encoded = encode_group(made)
    (saved,) = rows_of([decode_group(encoded.line, encoded.record)])
    assert saved.logprobs.tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_arrays_are_written_before_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskError, match=r"a\.jsonl cannot be written: it is a link"):
        append_group(path, group())
    assert arrays_file(path).stat().st_size > 0
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    append_group(path, group())
    (saved,) = read_groups(path)
    assert same_as_float32(saved, group()), "what a failed attempt left is passed over"


def change(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda arrays: arrays.unlink(), r"its arrays file a\.arrays cannot be read: No such .*; fix: put that file"),
        (lambda arrays: arrays.write_bytes(arrays.read_bytes()[:-1]), r"end at byte \d+ of a\.arrays, which has only"),
        (lambda arrays: change(arrays, arrays.stat().st_size - 1, b"~"), r"its arrays are damaged.*; fix: copy both"),
        (lambda arrays: change(arrays, arrays.stat().st_size // 2, struct.pack("<Q", 2**60)), "its arrays are damaged"),
    ],
)
def test_lost_arrays_are_told_with_their_line(tmp_path: Path, harm: Callable[[Path], None], problem: str) -> None:
    path = tmp_path / "a.jsonl"
    write_groups(path, [group("g0"), group("g1")])
    harm(arrays_file(path))
    with pytest.raises(ValueError, match=rf"a\.jsonl:\d is not a saved group: .*{problem}"):
        list(read_groups(path))


@pytest.mark.parametrize(
    ("place", "wrong", "problem"),
    [
        ("arrays", {"length": 2**62}, r"its arrays end at byte \d+ of a\.arrays, which has only"),
        ("arrays", {"offset": -1}, r"its arrays begin at byte -1"),
        ("row", {"token_ids": 2}, r".*its rows have 8 token_ids, but their array has 9; fix: remove whole lines"),
        ("row", {"token_ids": [1.5]}, r".*token_ids: Expected `int`, got `float`"),
        ("row", {"token_ids": [2**40]}, r".*token_ids: "),
        ("row", {"versions": 5}, r".*Expected `array`, got `int`"),
        ("chain", {"reward": math.nan}, r".*chain g\.1 has the reward nan, which is not finite"),
        ("chain", {"turn_rewards": [1.0, math.inf]}, r".*chain g\.1 has the reward inf, which is not finite"),
        ("chain", {"reward": "1"}, r".*Expected `float \| null`, got `str` - at `\$\.trajectories\[1\]\.reward`"),
    ],
)
def test_a_line_with_a_wrong_value_is_refused(tmp_path: Path, place: str, wrong: dict[str, Any], problem: str) -> None:
    def spoil(line: dict[str, Any]) -> None:
        chain = line["trajectories"][1]
        {"arrays": line["arrays"], "row": chain["rows"][0], "chain": chain}[place].update(wrong)

    path = saved_with(tmp_path, spoil)
    with pytest.raises(ValueError, match=rf"a\.jsonl:1 is not a saved group: {problem}"):
        list(read_groups(path))


# ---- version 0.1


def test_a_file_of_0_1_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(OLD, encoding="utf-8")
    append_group(path, group("g1"))
    old, new = read_groups(path)
    assert same_as_float32(new, group("g1"))
    assert math.isnan(old.task["x"])
    (chain,) = old.trajectories
    (saved,) = chain.rows
    assert saved == Row(
        [151644, 7, 5],
        [0, 1, 1],
        np.array([0.0, -0.1, -1e-7], dtype=np.float32),
        [Span("grpo-v0", 1, 3)],
        turn_ends=[3],
        roles=".ft",
    )
    assert saved.token_ids.dtype == np.int32
    assert chain.timeline[0].end == 0.5


# ---- contents of lines


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for broken in ('{"id": 1}', "[]", "5", '{"id": "g", "task": {}, "trajectories": [5]}', "{"):
        write_groups(path, [group()])
        with path.open("a") as lines:
            lines.write(broken + "\n")
        with pytest.raises(ValueError, match=r"a\.jsonl:2 is not a saved group"):
            list(read_groups(tmp_path))


def test_a_group_keeps_what_datasets_and_models_write(tmp_path: Path) -> None:
    task = {"n": 10**40, "where": {"x": (1, 2)}, "text": "\u2028\U0001f600", "when": datetime(2026, 1, 2)}
    chain = Trajectory("g.0", [{"content": None}], [Row([1], [0], [0.0])], Outcome.COMPLETED)
    chain.metrics = {"m": np.float64(0.1)}
    made = Group("g", task, [chain])
    write_groups(tmp_path / "a.jsonl", [made])
    task |= {"where": {"x": [1, 2]}, "when": "2026-01-02T00:00:00"}
    assert list(read_groups(tmp_path / "a.jsonl")) == [made]


@pytest.mark.parametrize("logprob", [5.0, math.nan, -math.inf])
def test_a_saved_log_probability_that_is_none_is_refused(tmp_path: Path, logprob: float) -> None:
    path = tmp_path / "a.jsonl"
    row = Row([1, 2, 3], [0, 1, 1], [0.0, -0.5, logprob])
    made = Group("g", {}, [Trajectory("g.0", [], [row], Outcome.COMPLETED, reward=1.0)])
    encoded = append_group(path, made)
    problem = f"chain g.0: token 2 of a row has the log-probability {logprob:g}; fix: it must be a number of at most 0"
    with pytest.raises(ValueError, match=rf"a\.jsonl:1 is not a saved group: {re.escape(problem)}"):
        list(read_groups(path))
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        decode_group(encoded.line, encoded.record)
    row.mask = [0, 1, 0]
    encoded = encode_group(made)
    decode_group(encoded.line, encoded.record)


def test_a_folder_of_groups_has_no_links_and_no_fifos(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.jsonl", tmp_path / "trajectories"
    outside.write_text("private\n")
    folder.mkdir()
    (folder / "train.jsonl").symlink_to(outside)
    with pytest.raises(OSError, match=r"train\.jsonl is a link, which is not followed; fix: "):
        list(read_groups(folder))
    (folder / "train.jsonl").unlink()
    os.mkfifo(folder / "train.jsonl")
    for named in (folder, folder / "train.jsonl"):
        with pytest.raises(OSError, match=r"train\.jsonl is a FIFO; fix: "):
            list(read_groups(named))
