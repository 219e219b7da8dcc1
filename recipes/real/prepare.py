"""Write the recipes' inputs: tasks of reasoning-gym, and transcripts of other tasks for SFT."""

import asyncio
import json
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object

HERE = Path(__file__).parent
rows = load_object("tasks.py:rows", HERE)
with_calculator, with_python = (
    load_object(f"transcripts.py:{name}", HERE) for name in ("with_calculator", "with_python")
)
TRAINING, HELD_OUT = 480, 100
KNOWN = {
    *("human", "chicken", "bird", "duck", "dog", "cat", "cow", "horse", "lion", "elephant", "giraffe", "tiger", "deer"),
    *("sheep", "spider", "snake"),
}
"""Animals whose legs Qwen2.5-Coder-1.5B can count; of insects and crabs it cannot."""
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


def leg_counting(folder: Path, seed: int) -> None:
    """Write the inputs for counting the legs of up to three kinds of animals with the calculator."""
    tasks = rows("leg_counting", 8000, seed, max_animals=3)
    known = [row for row in tasks if set(row["metadata"]["animals"]) <= KNOWN]
    _write(folder, known[HELD_OUT:], known[:HELD_OUT], asyncio.run(with_calculator(THINK, seed)))


def letter_counting(folder: Path, seed: int) -> None:
    """Write the inputs for counting a letter in a text with the code interpreter."""
    tasks = rows("letter_counting", TRAINING + HELD_OUT, seed)
    _write(folder, tasks[HELD_OUT:], tasks[:HELD_OUT], asyncio.run(with_python(PROGRAM, seed)))


def _write(folder: Path, train: list[Any], heldout: list[Any], transcripts: list[Any]) -> None:
    for name, table in (("train", train), ("heldout", heldout), ("transcripts", transcripts)):
        lines = (json.dumps(row) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
