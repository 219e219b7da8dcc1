"""Part of `make learn`: an agent that avoids lines learns to win TextArena's TicTacToe."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "textarena" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_how_to_win(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("textarena")
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=40)]
    assert_risen(train(RECIPE, seed, tmp_path, *overrides), full=0.8)
