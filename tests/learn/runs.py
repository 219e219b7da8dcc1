"""Training runs by the user's own command, as the learning tests make them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes" / "quickstart"
FULL = os.environ.get("LENGTH") == "full"
"""`make learn-worlds`: as many steps as the recipes say, and the figures that the pages tell. `make learn`: fewer."""
SHORT_STEPS = 25
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0").split()]


def agentfactory(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "agentfactory", *arguments], check=True)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def lines_of(stage: Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def shortened(*overrides: str, steps: int = SHORT_STEPS) -> list[str]:
    """`overrides`, and fewer steps unless in full length."""
    return [*overrides, *([] if FULL else [f"train.steps={steps}"])]


def assert_risen(summary: dict, full: float = 0.0, by: float = 0.3, figures: Sequence[str] = ("success",)) -> None:
    """Each of `figures` on held-out tasks has risen by at least `by`, and the first one to `full`, after all steps.

    Where they begin is not judged: processors round in other ways, and so their warm starts end in other places."""
    if FULL:
        assert summary[f"{figures[0]}_after"] >= full
    for figure in figures:
        assert summary[f"{figure}_after"] >= summary[f"{figure}_before"] + by, figure


def train(recipe: str, seed: int, tmp_path: Path, *overrides: str) -> dict:
    output = tmp_path / "run"
    agentfactory("train", str(RECIPES / recipe), f"output={output}", f"seed={seed}", *overrides)
    summary = read_json(output / "summary.json")
    print(json.dumps(summary, indent=2))
    return {**summary, "checkpoint": str(output / summary["checkpoint"])}
