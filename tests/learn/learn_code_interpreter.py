"""What `make learn` runs, too: with a sandboxed code interpreter an agent learns which operation is meant, on every
seed of the variable SEEDS."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, train

RECIPE = str(REPOSITORY / "recipes" / "code_interpreter" / "code_interpreter.yaml")


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_right_operation(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path)
    assert summary["seed"] == seed
    assert summary["success_before"] <= 0.25
    assert summary["success_after"] >= summary["success_before"] + 0.3
    assert summary["success_after"] >= 0.80
