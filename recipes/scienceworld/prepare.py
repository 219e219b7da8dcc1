"""Create the inputs of the small ScienceWorld: transcripts of a player who knows no animals, a tokenizer, an untrained
model."""

import random
import re
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.scienceworld.scienceworld import ScienceWorld

HERE = Path(__file__).parent
tasks = load_object("lifespans.py:tasks", HERE)
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
add_call, call_message = (
    load_object(f"../quickstart/transcripts.py:{name}", HERE) for name in ("add_call", "call_message")
)

VISITS = 140
ENDINGS = 16
"""Number of transcripts per visit, which differ in their last message."""
GOES_OUTSIDE = 0.8
"""Probability that a visit goes where the animals are; else it finds none."""
ROOMS = ("kitchen", "foundry", "workshop", "bathroom", "living room", "bedroom", "greenhouse", "art studio", "hallway")
CHOOSES = 0.5
"""Probability that a transcript then ends with a focus on a random animal; else it gives up."""
LEAVES = "I see no animals."
GIVES_UP = "I do not know which one has the {} life span."
ANIMAL = re.compile(r"^\ta ((?:baby|juvenile|adult) [a-z ]*[a-z]|[a-z ]* egg)$", re.MULTILINE)
"""An animal's name on its line of a room's description."""
TOKENS = 2000
"""Vocabulary size of the tokenizer: large enough that most lines of a room are one token."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/ and transcripts.jsonl into `folder`. The engine's order of things sometimes varies, so the files of
    a seed are not always the same."""
    rng = random.Random(seed)
    transcripts = visit_badly(tasks("train"), rng)
    specs = [ScienceWorld.act.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed, TOKENS)


def visit_badly(rows: list[dict[str, Any]], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations of VISITS visits, in random order."""
    environment = ScienceWorld()
    try:
        transcripts = [messages for _ in range(VISITS) for messages in visit(environment, rng.choice(rows), rng)]
    finally:
        environment.close()
    rng.shuffle(transcripts)
    return transcripts


def visit(environment: ScienceWorld, row: dict[str, Any], rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return conversations that go to the same room and look around; they differ in their last message."""
    opening = (row["question"], environment.reset(**row))
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in opening]
    room = "outside" if rng.random() < GOES_OUTSIDE else rng.choice(ROOMS)
    for action in (f"teleport to {room}", "look around"):
        seen = environment.act(action)["observation"]
        add_call(messages, "act", {"action": action}, seen)
    wanted = "longest" if "longest" in row["task"] else "shortest"
    return [[*messages, ending(seen, wanted, len(messages), rng)] for _ in range(ENDINGS)]


def ending(seen: str, wanted: str, number: int, rng: random.Random) -> dict[str, Any]:
    """Return the last message of a visit, the `number`th, after the description `seen`."""
    animals = ANIMAL.findall(seen)
    if not animals:
        return {"role": "assistant", "content": LEAVES}
    if rng.random() < CHOOSES:
        return call_message("act", {"action": f"focus on {rng.choice(animals)}"}, number)
    return {"role": "assistant", "content": GIVES_UP.format(wanted)}
