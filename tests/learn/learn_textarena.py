"""What `make learn` runs, too: an agent that misreads the hints of a guessing game learns what they mean."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "textarena" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_what_hints_mean(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("textarena")
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened()]
    assert_risen(train(RECIPE, seed, tmp_path, *overrides), full=0.8)
