"""Create the inputs of the tiny recipe: transcripts with a bad habit, a tokenizer, an untrained vision network."""

import json
import random
from pathlib import Path
from typing import Any

from my_task import Pictures
from seeing_model import SPECIAL, make_seeing_network, show_images, write_processors
from tiny_model import CHAT_TEMPLATE, train_tokenizer, write_jsonl

TASK = Path(__file__).parents[1]

CORNERS = ("top left", "top right", "bottom left", "bottom right")
LOOKS_AT_THE_NEXT_CORNER = 0.7
"""How often a transcript looks at the corner after the right one."""
SIDE = 64
"""Pixels of the largest picture that the network gets: four tokens."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, corners/ and transcripts.jsonl into `folder`; the same seed always gives the same files."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in (TASK / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    cloths = {(*row["images"], row["corner"]): row["answer"] for row in rows}
    (folder / "corners").mkdir()
    pictures = Pictures()
    transcripts = []
    for row in rows:
        turned = rng.random() < LOOKS_AT_THE_NEXT_CORNER
        corner = CORNERS[(CORNERS.index(row["corner"]) + turned) % len(CORNERS)]
        [file] = row["images"]
        pictures.reset([TASK / file])
        seen = f"corners/{Path(file).stem}-{corner.replace(' ', '-')}.png"
        pictures.look(corner).save(folder / seen)
        transcripts.append(look(row, corner, seen, cloths[file, corner]))
    specs = [Pictures.look.spec.to_openai()]
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    template = show_images(CHAT_TEMPLATE.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(transcripts, specs, template, SPECIAL)
    tokenizer.save_pretrained(folder / "model")
    make_seeing_network(tokenizer, SIDE, seed).save_pretrained(folder / "model")
    write_processors(folder / "model", SIDE)


def look(row: dict[str, Any], corner: str, seen: str, cloth: str) -> list[dict[str, Any]]:
    """Return a conversation: a look at a corner, and the name of the cloth that is `seen` there."""
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"corner": corner}}}
    return [
        {"role": "user", "content": [image(str(TASK / row["images"][0])), {"type": "text", "text": row["question"]}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "tool_call_id": "call_0", "content": [image(seen)]},
        {"role": "assistant", "content": cloth},
    ]


def image(file: str) -> dict[str, Any]:
    """Return the part of a message for an image; a path is relative to the file with the transcripts."""
    return {"type": "image_url", "image_url": {"url": file}}
