"""What `make learn` runs: the quickstart reverses a bad habit on every seed of the variable SEEDS, and with an adapter.

Its name keeps it out of `make test`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "quickstart.yaml"
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0").split()]
HELD_OUT_TASKS = 200


def agentfactory(*arguments: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "agentfactory", *arguments], check=True)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def train(tmp_path: Path, *overrides: str) -> dict:
    output = tmp_path / "run"
    agentfactory("train", str(RECIPE), f"output={output}", *overrides)
    summary = read_json(output / "summary.json")
    print(json.dumps(summary, indent=2))
    return summary


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_reverses_the_habit(tmp_path: Path, seed: int) -> None:
    summary = train(tmp_path, f"seed={seed}")
    assert summary["seed"] == seed
    assert summary["success_before"] <= 0.25
    assert summary["greedy_before"] <= 0.10
    assert summary["success_after"] >= 0.85
    assert summary["greedy_after"] >= 0.95

    agentfactory("eval", str(tmp_path / "run" / "recipe.yaml"), "--checkpoint", summary["checkpoint"])
    again = read_json(tmp_path / "run" / "eval" / "summary.json")
    assert again["sampled/success"] == pytest.approx(summary["success_after"], abs=1e-9)
    assert again["greedy/success"] == pytest.approx(summary["greedy_after"], abs=1e-9)
    heldout = tmp_path / "run" / "prepared" / "heldout.jsonl"
    assert len(heldout.read_text(encoding="utf-8").splitlines()) >= HELD_OUT_TASKS


def test_an_adapter_learns_too(tmp_path: Path) -> None:
    summary = train(tmp_path, f"seed={SEEDS[0]}", "grpo.model.lora.rank=8", "grpo.train.learning_rate=2e-3")
    assert summary["success_after"] >= 0.70
    metrics = [json.loads(line) for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").open(encoding="utf-8")]
    model = (tmp_path / "run" / "prepared" / "model" / "model.safetensors").stat().st_size
    # only the adapter travels
    assert 0 < max(line.get("sync/bytes", 0) for line in metrics) < model / 4
