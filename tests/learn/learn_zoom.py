"""Part of `make learn`: a vision-language network learns to zoom."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, assert_risen, train

RECIPE = str(REPOSITORY / "recipes" / "zoom" / "zoom.yaml")
SHORT = ("grpo.train.steps=25",)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_out_that_looking_pays(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path, *([] if FULL else SHORT))
    assert_risen(summary, full=0.80, figures=("success", "greedy"))
    assert summary["greedy_after"] >= 0.80
