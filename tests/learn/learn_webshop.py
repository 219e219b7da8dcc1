"""What `make learn` runs, too: in all of WebShop's environment an agent learns to choose and to buy."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, assert_risen, train

RECIPE = str(REPOSITORY / "recipes" / "webshop" / "small.yaml")
SHORT = ("sft.train.steps=300", "sft.train.schedule=constant", "grpo.train.steps=10")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_purchase(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path, *([] if FULL else SHORT))
    # not greedy success: whether most of the first greedy visits buy is as good as chance, 0.00 to 0.80 after SHORT
    assert_risen(summary, full=0.8, by=0.5 if FULL else 0.2, figures=("reward", "success"))
