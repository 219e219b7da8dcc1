"""`train.py` as users and launchers call it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, REPOSITORY

TRAIN = str(REPOSITORY / "train.py")


def launch(*arguments: str, processes: int = 1) -> None:
    """Run train.py on the CPU, by accelerate's own launcher where there are several processes."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    prefix = [sys.executable]
    if processes > 1:
        flags = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
        prefix = [str(Path(sys.executable).parent / "accelerate"), "launch", *flags]
        arguments = (*arguments, f"train.processes={processes}", "train.strategy=ddp")
    subprocess.run([*prefix, TRAIN, *arguments], check=True, env=environment)


def first_step(output: Path) -> dict[str, float]:
    return json.loads((output / "metrics.jsonl").read_text().splitlines()[0])


def test_saved_rows_give_the_same_first_gradient_on_one_process_and_on_two(
    quickstart_run: Path, warm_start: Path, tmp_path: Path
) -> None:
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "train": {
            "from_trajectories": str(quickstart_run / "grpo" / "trajectories" / "train.jsonl"),
            "steps": 2,
            "batch_size": 8,
            "learning_rate": 1e-4,
            "token_budget": 2048,
        },
    }
    (tmp_path / "saved.yaml").write_text(json.dumps(recipe))
    launch(str(tmp_path / "saved.yaml"), f"output={tmp_path / 'one'}")
    launch(str(tmp_path / "saved.yaml"), f"output={tmp_path / 'two'}", processes=2)
    one, two = first_step(tmp_path / "one"), first_step(tmp_path / "two")
    assert one["tokens"] == two["tokens"] > 1000
    assert one["grad_norm"] > 0.01
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert two["mismatch/max"] <= 1e-4, "the rows were sampled by these weights"


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
