"""What `make learn` runs, too: a network with eyes learns where to look, and knows nothing without looking."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, agentfactory, read_json, train

RECIPE = str(REPOSITORY / "recipes" / "zoom" / "zoom.yaml")
PATTERNS = 10
SHORT = ["sft.train.steps=600", "grpo.train.steps=20", "eval.data.limit=100"]


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_the_box_that_is_asked_for(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path, *([] if FULL else SHORT))
    assert summary["greedy_before"] <= 0.10
    assert summary["greedy_after"] >= (0.80 if FULL else 0.35)
    stage = Path(summary["checkpoint"]).parents[1]
    blank = f"mcp_servers.zoom.module={Path(__file__).with_name('blank_zoom.py')}:BlankZoom"
    agentfactory("eval", str(stage / "recipe.yaml"), "--checkpoint", summary["checkpoint"], blank)
    blind = read_json(stage / "eval" / "summary.json")
    # four standard deviations of 100 guesses above their mean
    assert blind["greedy/success"] <= 1 / PATTERNS + 0.12
