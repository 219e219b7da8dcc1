"""Write the recipes' inputs: tasks of reasoning-gym, and transcripts of other tasks for SFT."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tasks import rows
from transcripts import with_calculator, with_python

TRAINING, HELD_OUT = 480, 100
THINK = "Think in a sentence or two, and compute with the tool. End with the result alone, as <answer>result</answer>."
PROGRAM = (
    "Solve the task with a short Python program that prints the result. End with the result alone, as "
    "<answer>result</answer>."
)


def gsm_symbolic(folder: Path, seed: int) -> None:
    """Write the inputs for word problems with the calculator. The training tasks are a curriculum: short questions
    have few steps."""
    tasks = rows("gsm_symbolic", TRAINING + HELD_OUT, seed)
    train = sorted(tasks[HELD_OUT:], key=lambda row: len(row["question"]))
    _write(folder, train, tasks[:HELD_OUT], asyncio.run(with_calculator(THINK, seed)))


def letter_counting(folder: Path, seed: int) -> None:
    """Write the inputs for counting a letter in a text with the code interpreter."""
    tasks = rows("letter_counting", TRAINING + HELD_OUT, seed)
    _write(folder, tasks[HELD_OUT:], tasks[:HELD_OUT], asyncio.run(with_python(PROGRAM, seed)))


def _write(folder: Path, train: list[Any], heldout: list[Any], transcripts: list[Any]) -> None:
    for name, table in (("train", train), ("heldout", heldout), ("transcripts", transcripts)):
        # the metadata of a few word problems has fractions
        lines = (json.dumps(row, default=str) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
