"""Part of `make learn`: an agent that turns the wrong way learns to cross gymnasium's frozen lake."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "gymnasium" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_way_across_the_lake(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("gymnasium")
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=40)]
    assert_risen(train(RECIPE, seed, tmp_path, *overrides), full=0.8)
