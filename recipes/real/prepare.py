"""Write the recipes' inputs: tasks of reasoning-gym, and transcripts of other tasks for SFT."""

import json
from pathlib import Path
from typing import Any

from tasks import rows
from transcripts import with_calculator, with_python

TRAINING, HELD_OUT = 480, 100
SYSTEM_PROMPT = "Solve the task with the tool. End with the result alone, as <answer>result</answer>."


def gsm_symbolic(folder: Path, seed: int) -> None:
    """Write train.jsonl, heldout.jsonl and transcripts.jsonl for word problems with the calculator."""
    _write(folder, seed, "gsm_symbolic", with_calculator(SYSTEM_PROMPT, seed))


def count_bits(folder: Path, seed: int) -> None:
    """Write the same files for a family of tasks with the code interpreter."""
    _write(folder, seed, "count_bits", with_python(SYSTEM_PROMPT, seed))


def _write(folder: Path, seed: int, family: str, transcripts: list[dict[str, Any]]) -> None:
    tasks = rows(family, TRAINING + HELD_OUT, seed)
    # a curriculum: short questions have few steps
    train = sorted(tasks[HELD_OUT:], key=lambda row: len(row["question"]))
    for name, table in (("train", train), ("heldout", tasks[:HELD_OUT]), ("transcripts", transcripts)):
        # the metadata of a few word problems have fractions
        lines = (json.dumps(row, default=str) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
