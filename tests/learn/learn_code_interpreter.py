"""What `make learn` runs, too: with a sandboxed code interpreter an agent learns which operation is meant, on every
seed of the variable SEEDS."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "code_interpreter" / "code_interpreter.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_right_operation(tmp_path: Path, seed: int) -> None:
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=20)]
    summary = train(RECIPE, seed, tmp_path, *overrides)
    assert summary["seed"] == seed
    assert_risen(summary, full=0.80)
