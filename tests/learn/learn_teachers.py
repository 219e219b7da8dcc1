"""Learning runs of docs/teachers.md, part of `make learn`: a trained quickstart agent teaches a new one, and an agent
teaches itself."""

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


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_is_shown_a_solution_teaches_itself(tmp_path: Path, seed: int) -> None:
    summary = train("self-distill.yaml", seed, tmp_path)
    assert summary["success_before"] < 0.3
    assert summary["success_after"] >= 0.9
