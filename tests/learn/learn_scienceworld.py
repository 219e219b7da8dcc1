"""What `make learn-worlds` runs: on ScienceWorld's engine an agent learns to choose the animal that lives longest, or
shortest."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, train
from tests.tools.scienceworld.games import needs_java

RECIPE = str(REPOSITORY / "recipes" / "scienceworld" / "small.yaml")


@needs_java
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_animal(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path)
    before, after = summary["success_before"], summary["success_after"]
    assert summary["greedy_before"] <= 0.25
    assert before <= 0.25
    assert after >= max(0.3, 2 * before)
