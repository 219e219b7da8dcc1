"""What `make learn` runs, too: with a search over a real index an agent learns to look up what it has just read."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "two_hop" / "two_hop.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_second_search(tmp_path: Path, seed: int) -> None:
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=15)]
    summary = train(RECIPE, seed, tmp_path, *overrides)
    assert_risen(summary, full=0.80)
