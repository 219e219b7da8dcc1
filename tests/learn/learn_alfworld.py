"""What `make learn-worlds` runs: on ALFWorld's engine an agent learns to search on until it has found what it needs."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, train
from tests.worlds.alfworld.engines import PYTHON

RECIPE = str(REPOSITORY / "recipes" / "alfworld" / "small.yaml")


@pytest.mark.skipif(PYTHON is None, reason="AGENTFACTORY_ALFWORLD_PYTHON names no Python: make learn-worlds")
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_out_that_searching_on_pays(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path)
    assert_risen(summary, full=0.3, by=0.2, figures=("success", "greedy"))
