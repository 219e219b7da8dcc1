"""Part of `make learn`: a network learns from reasoning-gym's verifier to spell words backward."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, shortened, train

RECIPE = str(REPOSITORY / "recipes" / "reasoning_gym" / "small.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verifier_teaches_to_spell_backward(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("reasoning_gym")
    overrides = [setting.replace("train.", "grpo.train.") for setting in shortened(steps=40)]
    summary = train(RECIPE, seed, tmp_path, *overrides)
    assert_risen(summary, full=0.80)
