"""Part of `make learn`: a vision-language network learns to zoom, and cannot answer without zooming."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, agentfactory, assert_risen, read_json, train

RECIPE = str(REPOSITORY / "recipes" / "zoom" / "zoom.yaml")
PATTERNS = 10
SHORT = ("grpo.train.steps=25",)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_out_that_looking_pays(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path, *([] if FULL else SHORT))
    assert_risen(summary, full=0.80, figures=("success", "greedy"))
    assert summary["greedy_after"] >= 0.80
    recipe = Path(summary["checkpoint"]).parents[1] / "recipe.yaml"
    blank = f"mcp_servers.zoom.module={Path(__file__).with_name('blank_zoom.py')}:BlankZoom"
    output = tmp_path / "blind"
    agentfactory("eval", str(recipe), "--checkpoint", summary["checkpoint"], blank, f"output={output}")
    blind = read_json(output / "eval" / "summary.json")
    # four standard deviations of 200 guesses above their mean
    assert blind["greedy/success"] <= 1 / PATTERNS + 0.085
