"""Writes the rows: run `python make_tasks.py` in this folder after a change."""

import json
import random
from pathlib import Path

FLOORS, FARTHEST = 150, 4
"""Floors of the tower, and how far from the lift a parcel is at most."""
HELD_OUT = 100
"""How many rows are for evaluation alone. No lift starts on one of their floors in training."""


def make(folder: Path, seed: int = 0) -> None:
    """Write tasks.jsonl and heldout.jsonl into `folder`; a seed always gives the same rows."""
    rng = random.Random(seed)
    starts = list(range(1, FLOORS + 1))
    rng.shuffle(starts)
    held_out: list[dict] = []
    while len(held_out) < HELD_OUT:
        held_out += rows_from(starts.pop())
    trained = [row for start in starts for row in rows_from(start)]
    rng.shuffle(trained)
    for name, rows in (("heldout.jsonl", held_out[:HELD_OUT]), ("tasks.jsonl", trained)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_from(start: int) -> list[dict]:
    """Return the tasks that begin on a floor."""
    parcels = [floor for floor in range(start - FARTHEST, start + FARTHEST + 1) if 1 <= floor <= FLOORS]
    question = f"The lift stands on floor {start}. Fetch the parcel."
    return [{"question": question, "start": start, "parcel": parcel} for parcel in parcels if parcel != start]


if __name__ == "__main__":
    make(Path(__file__).parent)
