"""What `make learn` runs too: an agent learns with a sandboxed code interpreter which operation is meant, on every
seed of the variable SEEDS."""

from pathlib import Path

import pytest

from rollout.trajectory import Group, read_groups
from tests.learn.learn_quickstart import SEEDS, read_json, train

RECIPE = "../code_interpreter/code_interpreter.yaml"


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_right_code(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path)
    assert summary["seed"] == seed
    assert summary["success_before"] <= 0.25
    assert summary["success_after"] - summary["success_before"] >= 0.3
    assert summary["success_after"] >= 0.85
