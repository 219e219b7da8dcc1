"""Part of `make learn`: the task of docs/database.md learns on every seed of the variable SEEDS."""

from pathlib import Path

import pytest

from tests.database_page import follow
from tests.learn.runs import SEEDS, assert_risen, read_json


@pytest.mark.parametrize("seed", SEEDS)
def test_the_database_task_learns(tmp_path: Path, seed: int) -> None:
    summary = read_json(follow(tmp_path, f"seed={seed}") / "runs" / "shop-tiny" / "summary.json")
    print(f"seed {seed}: {summary}")
    assert_risen(summary)
    assert summary["success_after"] >= 0.85
