"""What `make learn` runs, too: the agent of the quickstart teaches a new one, by the commands of docs/teachers.md."""

from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, train


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trained_agent_teaches_a_new_one(tmp_path: Path, seed: int) -> None:
    (tmp_path / "teacher").mkdir()
    teacher = train("quickstart.yaml", seed, tmp_path / "teacher")
    summary = train("distill.yaml", seed, tmp_path, f"distill.teacher.model={teacher['checkpoint']}")
    assert summary["success_before"] < 0.3
    assert summary["success_after"] >= 0.9
