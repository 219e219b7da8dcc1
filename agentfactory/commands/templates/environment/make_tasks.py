"""Write the rows: run `python make_tasks.py` in this folder after a change."""

import itertools
import json
import random
from pathlib import Path

WANTED = range(50, 110)
"""Degrees Fahrenheit that fish need."""
FARTHEST, DIRTIEST = 3, 2
"""Maximum error of the water in degrees, and maximum dirt."""
HELD_OUT = 100
"""Number of rows for evaluation only. The degrees that their fish need never occur in training."""


def make(folder: Path, seed: int = 0) -> None:
    """Write tasks.jsonl and heldout.jsonl into `folder`; a seed always gives the same rows."""
    rng = random.Random(seed)
    wanted = rng.sample(WANTED, len(WANTED))
    held_out: list[dict] = []
    while len(held_out) < HELD_OUT:
        held_out += rows_of(wanted.pop())
    trained = [row for degrees in wanted for row in rows_of(degrees)]
    rng.shuffle(trained)
    for name, rows in (("heldout.jsonl", held_out[:HELD_OUT]), ("tasks.jsonl", trained)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(wanted: int) -> list[dict]:
    """Return the tasks whose fish need `wanted` degrees."""
    question = f"The fish need {wanted} degrees and clean water."
    waters = itertools.product(range(wanted - FARTHEST, wanted + FARTHEST + 1), range(DIRTIEST + 1))
    rows = [{"question": question, "wanted": wanted, "degrees": degrees, "dirt": dirt} for degrees, dirt in waters]
    return [row for row in rows if row["degrees"] != wanted or row["dirt"]]


if __name__ == "__main__":
    make(Path(__file__).parent)
