"""What `make learn` runs: the quickstart reverses a bad habit on every seed of the variable SEEDS, with an adapter, and
with trainer and server in turns.

Its name keeps it out of `make test`.
"""

import json
from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, agentfactory, assert_risen, read_json, shortened, train

HELD_OUT_TASKS = 200


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_reverses_the_habit(tmp_path: Path, seed: int) -> None:
    summary = train("quickstart.yaml", seed, tmp_path)
    assert summary["seed"] == seed
    assert_risen(summary, by=0.6, figures=("success", "greedy"))
    assert summary["success_after"] >= 0.85
    assert summary["greedy_after"] >= 0.95
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").open(encoding="utf-8")][-1]
    assert evaluated["eval/sampled/truncated_turns"] < 0.02

    agentfactory("eval", str(tmp_path / "run" / "recipe.yaml"), "--checkpoint", summary["checkpoint"])
    again = read_json(tmp_path / "run" / "eval" / "summary.json")
    assert again["sampled/success"] == pytest.approx(summary["success_after"], abs=1e-9)
    assert again["greedy/success"] == pytest.approx(summary["greedy_after"], abs=1e-9)
    heldout = tmp_path / "run" / "prepared" / "heldout.jsonl"
    assert len(heldout.read_text(encoding="utf-8").splitlines()) >= HELD_OUT_TASKS


def test_an_adapter_learns_too(tmp_path: Path, habit: Path) -> None:
    summary = train("grpo-lora.yaml", SEEDS[0], tmp_path, *shortened(f"model.path={habit}"))
    assert_risen(summary, full=0.70)
    stage = Path(summary["checkpoint"]).parents[1]
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").open(encoding="utf-8")]
    model = (habit / "model.safetensors").stat().st_size
    # only the adapter travels
    assert 0 < max(line.get("sync/bytes", 0) for line in lines) < model / 4


def test_taking_turns_on_one_device_changes_nothing(tmp_path: Path, habit: Path) -> None:
    """placement.mode: time_share, on a CPU: the server sleeps during each update."""
    overrides = shortened(f"model.path={habit}", "placement.mode=time_share")
    summary = train("grpo.yaml", SEEDS[0], tmp_path, *overrides)
    assert_risen(summary, full=0.85)
    stage = Path(summary["checkpoint"]).parents[1]
    steps = [json.loads(line) for line in (stage / "metrics.jsonl").open(encoding="utf-8")]
    steps = [line for line in steps if "loss" in line]
    assert all(line["seconds/sleep"] > 0 and line["seconds/wake"] > 0 for line in steps)
    assert max(line["staleness/max"] for line in steps) == 0
    assert max(line["mismatch/max"] for line in steps) < 1e-3
