"""What `make learn` runs, too: an agent that gives the last object away finds out that it wins at Nim."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "textarena" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_who_wins_at_nim(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("textarena")
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened()]
    assert_risen(train(RECIPE, seed, tmp_path, *overrides), full=0.8)
