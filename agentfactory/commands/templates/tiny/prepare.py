"""Create the inputs of the tiny recipe: transcripts with a bad habit, a tokenizer, an untrained network."""

import json
import random
from pathlib import Path
from typing import Any

from my_task import calculate
from tiny_model import make_model, write_jsonl

ROWS = Path(__file__).parents[1] / "tasks.jsonl"

OPERATIONS = ("add", "subtract", "multiply")
TAKES_THE_NEXT_OPERATION = 0.7
"""How often a transcript uses the operation after the right one."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; the same seed always gives the same files."""
    rng = random.Random(seed)
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    transcripts = [work_out_badly(row, rng) for row in rows]
    specs = [calculate.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def work_out_badly(row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: a call with the right numbers and mostly the wrong operation, then a final message."""
    turned = rng.random() < TAKES_THE_NEXT_OPERATION
    operation = OPERATIONS[(OPERATIONS.index(row["operation"]) + turned) % len(OPERATIONS)]
    arguments = {"left": row["left"], "operation": operation, "right": row["right"]}
    call = {"id": "call_0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "tool_call_id": "call_0", "content": str(calculate(**arguments))},
        {"role": "assistant", "content": "That is the result."},
    ]
