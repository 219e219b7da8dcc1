"""What `make learn` runs, too: in a shop of 1,200 products an agent learns to search for what the instruction asks for,
and to choose it, on every seed of the variable SEEDS."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "webshop" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_what_the_instruction_asks_for(tmp_path: Path, seed: int) -> None:
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=20)]
    summary = train(RECIPE, seed, tmp_path, *overrides)
    assert summary["seed"] == seed
    assert summary["success_before"] <= 0.25
    assert summary["greedy_before"] <= 0.10
    assert_risen(summary, full=0.80)
