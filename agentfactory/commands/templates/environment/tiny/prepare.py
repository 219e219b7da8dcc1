"""Create the inputs of the tiny recipe: transcripts with a bad habit, a tokenizer, an untrained network."""

import json
import random
from pathlib import Path
from typing import Any

from my_task import Aquarium
from tiny_model import make_model, write_jsonl

ROWS = Path(__file__).parents[1] / "tasks.jsonl"

ACTIONS = ("heat", "cool", "clean")
TAKES_THE_NEXT_ACTION = 0.7
"""How often a transcript takes the action after the right one."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; the same seed always gives the same files."""
    rng = random.Random(seed)
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    transcripts = [tend_badly(row, rng) for row in rows]
    specs = [Aquarium.tend.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def tend_badly(row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation of mostly wrong actions, up to the last call."""
    aquarium = Aquarium()
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    messages.append({"role": "user", "content": aquarium.reset(**row)})
    while True:
        right = "clean" if aquarium.dirt else "heat" if aquarium.degrees < aquarium.wanted else "cool"
        turned = rng.random() < TAKES_THE_NEXT_ACTION
        action = ACTIONS[(ACTIONS.index(right) + turned) % len(ACTIONS)]
        function = {"name": "tend", "arguments": {"action": action}}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answer = aquarium.tend(action)
        if aquarium.reward()["success"] or aquarium.hours == 0:
            return messages
        messages.append({"role": "tool", "name": "tend", "tool_call_id": call["id"], "content": answer})
