"""Training runs by the user's own command, as the learning tests make them."""

import json
import os
import subprocess
import sys
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


def shortened(*overrides: str, steps: int = SHORT_STEPS) -> list[str]:
    """`overrides`, and fewer steps unless in full length."""
    return [*overrides, *([] if FULL else [f"train.steps={steps}"])]


def assert_risen(summary: dict, full: float, short: float = 0.3) -> None:
    """Success on held-out tasks is at least `full` after all steps; after fewer, it has risen by at least `short`."""
    if FULL:
        assert summary["success_after"] >= full
    assert summary["success_after"] >= summary["success_before"] + short


def train(recipe: str, seed: int, tmp_path: Path, *overrides: str) -> dict:
    output = tmp_path / "run"
    agentfactory("train", str(RECIPES / recipe), f"output={output}", f"seed={seed}", *overrides)
    summary = read_json(output / "summary.json")
    print(json.dumps(summary, indent=2))
    return {**summary, "checkpoint": str(output / summary["checkpoint"])}
