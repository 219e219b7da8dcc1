"""Part of `make learn-worlds`: in a real Chromium, a vision-language network learns to click the named box."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import SEEDS, assert_risen, train

RECIPE = str(REPOSITORY / "recipes" / "screens" / "click.yaml")
AIM = 0.80


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium")
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_finds_out_that_the_named_box_pays(tmp_path: Path, seed: int) -> None:
    summary = train(RECIPE, seed, tmp_path)
    # transcripts without "Please" neither obey nor avoid the instruction: one box of four, or none
    assert summary["success_before"] <= 0.25
    assert summary["greedy_before"] <= 0.25
    assert_risen(summary, full=AIM, figures=("success", "greedy"))
    assert summary["greedy_after"] >= AIM
