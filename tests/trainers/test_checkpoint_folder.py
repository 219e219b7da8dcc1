"""Checkpoint folders: damage is detected, the right ones are kept, and a TrainState survives a round trip."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.checkpoints.checkpoint import compact, expand
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, find_best, newest_whole, prune, verify


def best(folder: Path) -> Path | None:
    found = find_best(checkpoints(folder), "eval/sampled/success")
    return found and found.path


def write(folder: Path, step: int, success: float | None = None) -> Path:
    path = checkpoint_folder.checkpoint_path(folder, step)
    with checkpoint_folder.written_aside(path) as aside:
        metrics = {} if success is None else {"eval/sampled/success": success}
        (aside / "trainer_state.json").write_text(json.dumps({"step": step, "metrics": metrics}))
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_bytes(bytes(range(256)))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "model" / "weights").write_bytes(bytes(256)), "model/weights does not match its digest"),
        (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda path: (path / "digests.json").write_text("{"), r"digests\.json cannot be read"),
        (lambda path: (path / "digests.json").write_text("{}"), r"digests\.json lists no files"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    verify(second)
    damage(second)
    with pytest.raises(checkpoint_folder.DamagedCheckpointError, match=f"step-000002 is damaged: {said}"):
        verify(second)
    assert newest_whole(checkpoints(tmp_path)) == first
    damage(first)
    assert newest_whole(checkpoints(tmp_path)) is None


def test_a_failure_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint_folder.checkpoint_path(tmp_path, 1)
    with pytest.raises(OSError, match="no space"), checkpoint_folder.written_aside(path):
        raise OSError("no space")
    assert checkpoints(tmp_path) == []


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, success in ((2, 0.1), (4, 0.9), (6, 0.9), (8, None), (10, 0.3), (1000000, 0.2)):
        write(tmp_path, step, success)
    (tmp_path / ".step-000003.partial").mkdir()
    (tmp_path / ".step-000003.deleted").mkdir()
    (tmp_path / "set-aside").mkdir()
    prune(tmp_path, None, best(tmp_path))
    assert len(checkpoints(tmp_path)) == 6, "no rule allows deleting any"
    prune(tmp_path, 2, best(tmp_path))
    assert names(tmp_path) == ["set-aside", "step-000006", "step-000010", "step-1000000"]
    prune(tmp_path, 1, None)
    assert names(tmp_path) == ["set-aside", "step-1000000"]


def test_a_figure_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    for step, success in ((10, math.nan), (20, 0.5), (30, 0.9), (40, math.inf), (50, math.nan), (60, 0.1)):
        write(tmp_path, step, success)
    prune(tmp_path, 2, best(tmp_path))
    assert names(tmp_path) == ["step-000030", "step-000050", "step-000060"]
    for path, success in zip(checkpoints(tmp_path), (math.nan, None, math.nan), strict=True):
        (path / "trainer_state.json").write_text(json.dumps({"metrics": {"eval/sampled/success": success}}))
    prune(tmp_path, 1, best(tmp_path))
    assert names(tmp_path) == ["step-000060"]


def test_by_itself_success_decides_and_reward_where_there_is_none(tmp_path: Path) -> None:
    write(tmp_path, 10, 0.5)
    write(tmp_path, 20)
    (tmp_path / "step-000020" / "trainer_state.json").write_text('{"metrics": {"eval/sampled/reward": 9.0}}')
    found = find_best(checkpoints(tmp_path), "auto")
    assert (found.path.name, found.step, found.metric, found.value) == ("step-000010", 10, "eval/sampled/success", 0.5)
    assert find_best(checkpoints(tmp_path)[1:], "auto").value == 9.0
    assert find_best(checkpoints(tmp_path), None) is None


def test_ids_are_kept_as_ranges() -> None:
    others = {"g1000000", "g000641-1", "a", "a7", "a8", "12"}
    ids = {f"g{number:06d}" for number in (*range(640), 642, 999_999)} | others
    assert compact(ids) == [
        *(["12", "12"], ["a", "a"], ["a7", "a8"]),
        *(["g000000", "g000639"], ["g000642", "g000642"], ["g999999", "g1000000"], ["g000641-1", "g000641-1"]),
    ]
    assert sorted(expand(compact(ids))) == sorted(ids)
