"""Create the inputs of three recipes, and an untrained model for all of them."""

import json
import random
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object

RECIPES = Path(__file__).parents[1]
TASKS = {"hunt": "quickstart", "code": "code_interpreter", "search": "two_hop"}
"""Source -> the folder of its recipe."""
make_model, write_jsonl = (
    load_object(f"quickstart/tiny_model.py:{name}", RECIPES) for name in ("make_model", "write_jsonl")
)
TOKENS = 1600


def prepare(folder: Path, seed: int) -> None:
    """Write hunt/, code/ and search/, as the three recipes do, and model/ and transcripts.jsonl for all; a seed always
    gives the same files."""
    transcripts: list[dict[str, Any]] = []
    specs: list[dict[str, Any]] = []
    for source, recipe in TASKS.items():
        own = folder / source
        own.mkdir()
        load_object(f"{recipe}/prepare.py:prepare", RECIPES)(own, seed)
        rows = [json.loads(line) for line in (own / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()]
        specs += rows[0]["tools"]
        transcripts += rows[:3000]
    random.Random(seed).shuffle(transcripts)
    write_jsonl(folder / "transcripts.jsonl", transcripts)
    make_model(folder / "model", [row["messages"] for row in transcripts], specs, seed, TOKENS)
