"""Part of `make learn`: training ahead learns as training in step does.

All seeds, stalenesses and algorithms: `python benchmarks/staleness.py`."""

import json
from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, assert_risen, shortened, train


@pytest.mark.parametrize("staleness", [2, 4])
def test_training_ahead_learns_too(tmp_path: Path, habit: Path, staleness: int) -> None:
    ahead = (f"rollout.max_staleness={staleness}", "rollout.concurrency=512")
    summary = train("grpo.yaml", SEEDS[0], tmp_path, *shortened(f"model.path={habit}", *ahead))
    assert_risen(summary, full=0.85)
    assert summary["warnings"] == []
    stage = Path(summary["checkpoint"]).parents[1]
    steps = [line for line in map(json.loads, (stage / "metrics.jsonl").open(encoding="utf-8")) if "loss" in line]
    assert sum(line["staleness/mean"] for line in steps) / len(steps) > staleness / 2
