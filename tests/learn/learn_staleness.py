"""What `make learn` runs: training ahead learns as training in step does, and a run that dies is told and ended.

All seeds, stalenesses and algorithms: `python benchmarks/staleness.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learn.runs import RECIPES, SEEDS, assert_risen, read_json, shortened, train


@pytest.mark.parametrize("staleness", [2, 4])
def test_training_ahead_learns_too(tmp_path: Path, habit: Path, staleness: int) -> None:
    ahead = (f"rollout.max_staleness={staleness}", "rollout.concurrency=512")
    summary = train("grpo.yaml", SEEDS[0], tmp_path, *shortened(f"model.path={habit}", *ahead))
    assert_risen(summary, full=0.85)
    assert summary["warnings"] == []
    stage = Path(summary["checkpoint"]).parents[1]
    steps = [line for line in map(json.loads, (stage / "metrics.jsonl").open(encoding="utf-8")) if "loss" in line]
    assert sum(line["staleness/mean"] for line in steps) / len(steps) > staleness / 2


def test_a_run_that_dies_is_told_and_ended(tmp_path: Path, habit: Path) -> None:
    """A learning rate a hundred times too high: ten times may be survived."""
    output, recipe = tmp_path / "run", str(RECIPES / "grpo.yaml")
    settings = [f"output={output}", f"seed={SEEDS[0]}", f"model.path={habit}", "train.learning_rate=4e-2"]
    settings.append("train.stop_when=[no_gradient, entropy, mismatch, success]")
    command = [sys.executable, "-m", "agentfactory", "train", recipe, *settings]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr)
    assert result.returncode == 3
    summary = read_json(output / "summary.json")
    assert summary["status"] == "stopped"
    (warning, *_) = summary["warnings"]
    assert f"warning: {warning}" in result.stdout
    assert summary["reason"].startswith("train.stop_when: ")
    steps = [line for line in map(json.loads, (output / "metrics.jsonl").open(encoding="utf-8")) if "loss" in line]
    last = max(line["step"] for line in steps if line["groups/equal_rewards"] < 1.0)  # that had anything to learn from
    assert int(warning.removeprefix("step ").partition(":")[0]) <= last + 5
