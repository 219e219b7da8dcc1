"""Write the recipes' inputs: tasks of reasoning-gym, and transcripts of other tasks for SFT."""

import json
from pathlib import Path

from tasks import rows
from transcripts import with_calculator

TRAINING, HELD_OUT, TRANSCRIPTS = 480, 100, 100
SYSTEM_PROMPT = "Think in a sentence or two, and compute with the tool. End with the result alone, as <answer>result</answer>."


def gsm_symbolic(folder: Path, seed: int) -> None:
    """Write train.jsonl, heldout.jsonl and transcripts.jsonl for word problems with the calculator."""
    tasks = rows("gsm_symbolic", TRAINING + HELD_OUT, seed)
    transcripts = with_calculator(SYSTEM_PROMPT, TRANSCRIPTS, seed)
    # a curriculum: short questions have few steps
    train = sorted(tasks[HELD_OUT:], key=lambda row: len(row["question"]))
    for name, table in (("train", train), ("heldout", tasks[:HELD_OUT]), ("transcripts", transcripts)):
        # the metadata of a few word problems has fractions
        lines = (json.dumps(row, default=str) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
