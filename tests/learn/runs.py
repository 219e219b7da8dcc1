"""Training runs by the user's own command, as the learning tests make them."""

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes" / "quickstart"
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0").split()]


def agentfactory(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "agentfactory", *arguments], check=True)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def train(recipe: str, seed: int, tmp_path: Path, *overrides: str) -> dict:
    output = tmp_path / "run"
    agentfactory("train", str(RECIPES / recipe), f"output={output}", f"seed={seed}", *overrides)
    summary = read_json(output / "summary.json")
    print(json.dumps(summary, indent=2))
    return summary
