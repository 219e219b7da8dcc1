"""`train.py` as users and launchers call it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.launching.run_folder import Hold, RunFolder
from tests.conftest import QUICKSTART, REPOSITORY

pytestmark = pytest.mark.processes

TRAIN = str(REPOSITORY / "train.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing"),
        ([str(QUICKSTART / "quickstart.yaml")], "agentfactory train"),
        ([str(QUICKSTART / "grpo.yaml")], "agentfactory serve"),
    ],
)
def test_what_train_py_cannot_do_is_told_with_the_command_that_can(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = subprocess.run([sys.executable, TRAIN, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    settings = {"model.path": "model", "data.path": "rows.jsonl", "rewards": "[exact_match]", "train.steps": "1"}
    settings |= {"server.engine": "embedded", "server.url": "http://127.0.0.1:9", "output": "run"}
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    command = [sys.executable, TRAIN, "recipe.yaml", *(f"{name}={value}" for name, value in settings.items())]
    with Hold(folder.path) as hold:
        hold.take(make=True)
        result = subprocess.run([*command, "--resume"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    told = f"output: {folder.path}: a run is alive there (pid {os.getpid()}); fix: wait for it, end it, or output=OTHER"
    assert result.stderr.splitlines()[-1] == told
    assert folder.recipe.read_text() == ""


FAULTS = """
from agentfactory import reward

@reward
def half(trajectory, answer) -> float:
    if "test" in answer:
        raise KeyError("lft")
    return float(len(trajectory.rows[0].token_ids) % 2)
"""


def test_what_goes_wrong_on_the_way_is_told_where_a_person_looks(tmp_path: Path, warm_start: Path) -> None:
    """In the terminal, and in the trainer's log for later: a reward that raises on each held-out task."""
    (tmp_path / "faults.py").write_text(FAULTS)
    for name in ("train", "test"):
        rows = [{"question": f"Question {index}?", "answer": name} for index in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": "train.jsonl"},
        "eval": {"data": {"path": "test.jsonl"}},
        "rewards": ["faults.py:half"],
        "rollout": {"group_size": 2, "max_tokens": 8, "max_total_tokens": 512},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": 1, "batch_size": 1},
        "output": "run",
    }
    # JSON is YAML
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "agentfactory", "train", "recipe.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = "held-out tasks, sampled: 4 of 4 chains ended as reward_error, such as: RewardError"
    assert f"warning: {told}" in result.stdout
    assert told in (tmp_path / "run" / "logs" / "train.log").read_text()
