"""Creates what the tiny recipe needs: transcripts with a bad habit, a tokenizer, an untrained network."""

import json
import random
from pathlib import Path
from typing import Any

from my_task import Lift
from tiny_model import make_model, write_jsonl

ROWS = Path(__file__).parents[1] / "tasks.jsonl"

RIDES_AWAY = 0.7
"""How often a transcript rides away from the parcel."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`; the same seed always gives the same files."""
    rng = random.Random(seed)
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    transcripts = [ride_badly(row, rng) for row in rows]
    specs = [Lift.ride.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def ride_badly(row: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation of rides that mostly go in the wrong direction, up to the last call."""
    lift = Lift()
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    messages.append({"role": "user", "content": lift.reset(**row)})
    while True:
        is_above = lift.parcel > lift.here
        direction = "up" if is_above != (rng.random() < RIDES_AWAY) else "down"
        function = {"name": "ride", "arguments": {"direction": direction}}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answer = lift.ride(direction)
        if lift.here == lift.parcel or lift.power == 0:
            return messages
        messages.append({"role": "tool", "name": "ride", "tool_call_id": call["id"], "content": answer})
