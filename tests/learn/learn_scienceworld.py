"""What `make learn` runs, too: on ScienceWorld's engine an agent learns to choose the animal that lives longest, or
shortest."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, assert_risen, train
from tests.worlds.scienceworld.games import needs_java

RECIPE = str(REPOSITORY / "recipes" / "scienceworld" / "small.yaml")
SHORT = (
    "sft.train.steps=150",
    "grpo.train.steps=8",
    "grpo.train.updates_per_batch=3",
    "grpo.eval.data.limit=32",
)


@needs_java
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_animal(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path, *([] if FULL else SHORT))
    assert_risen(summary, full=0.3, by=0.15 if FULL else 0.1)
