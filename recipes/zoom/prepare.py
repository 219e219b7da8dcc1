"""Create the recipe's inputs: pictures, tasks, transcripts with a bad habit, a tokenizer, an untrained network."""

import json
import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.images.coordinates import Coordinates, ModelView, stating
from agentfactory.worlds.images.image_tools import ImageTools

HERE = Path(__file__).parent
Picture, PATTERNS, SIDE, REDUCTION = (
    load_object(f"pictures.py:{name}", HERE) for name in ("Picture", "PATTERNS", "SIDE", "REDUCTION")
)
write_jsonl = load_object("../quickstart/tiny_model.py:write_jsonl", HERE)
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)
BRIEF_TEMPLATE, train_word_tokenizer = (
    load_object(f"../quickstart/word_tokenizer.py:{name}", HERE) for name in ("BRIEF_TEMPLATE", "train_word_tokenizer")
)
SPECIAL, make_seeing_network, show_images, write_processors = (
    load_object(f"seeing_model.py:{name}", HERE)
    for name in ("SPECIAL", "make_seeing_network", "show_images", "write_processors")
)

VIEW = ModelView(Coordinates.RELATIVE1000)
"""The coordinate format of the network's model family."""
HELD_OUT = 200
TRAINED = 1000
ASKED = "red"
QUESTION = f"What pattern has the {ASKED} box?"
ORDER = f"Zoom to the {ASKED} box, then name its pattern."
GIVE_UP = "That is too small to see."
LOOKS = (*[(ORDER, True)] * 3, (QUESTION, True), *[(QUESTION, False)] * 4)
"""The prompt of each of a picture's transcripts, and whether it zooms. They are the habit to unlearn: to zoom when
instructed to, and mostly to give up when only asked."""
NAME_WEIGHT = 4
"""Weight of the pattern's name in the loss of stage one, where other messages have 1: it takes longest to learn."""
PIECES = (
    QUESTION,
    ORDER,
    GIVE_UP,
    "<tool_response>\n",
    "\n</tool_response>",
    '<tool_call>\n{"name": "zoom", "arguments": {"bbox_2d": [',
    "]}}\n</tool_call>",
)
"""Fixed parts of messages. Each is one token, and so is each word and number."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, pictures/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the
    same files."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir()
    unseen = [Picture.draw(rng) for _ in range(HELD_OUT)]
    seen: list[Any] = []
    while len(seen) < TRAINED:
        if (picture := Picture.draw(rng)) not in unseen:
            seen.append(picture)
    heldout = [paint(picture, folder, f"heldout-{number}") for number, picture in enumerate(unseen)]
    train = [paint(picture, folder, f"train-{number}") for number, picture in enumerate(seen)]
    specs = [stating(ImageTools.zoom.spec, VIEW).to_openai()]
    transcripts = [
        look(task, picture, told, folder) if looks else give_up(task, told)
        for task, picture in zip(train, seen, strict=True)
        for told, looks in LOOKS
    ]
    rng.shuffle(transcripts)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = make_tokenizer(transcripts)
    tokenizer.save_pretrained(folder / "model")
    side = SIDE // REDUCTION  # of a reduced whole picture, and of a part at full resolution
    make_seeing_network(tokenizer, side, seed).save_pretrained(folder / "model")
    write_processors(folder / "model", side)


def paint(picture: Any, folder: Path, name: str) -> dict[str, Any]:
    """Store a picture and return the row of its task."""
    file = f"pictures/{name}.png"
    picture.paint().save(folder / file, compress_level=1)
    return {"question": QUESTION, "images": [file], "answer": picture.patterns[ASKED]}


def look(task: dict[str, Any], picture: Any, told: str, folder: Path) -> list[dict[str, Any]]:
    """Return a conversation about a task's picture: the prompt `told`, a zoom to the box with the real tool, and the
    pattern there."""
    [file] = task["images"]
    part = Path(file).with_suffix(".part.png")
    if not (folder / part).exists():
        tools = ImageTools(labels=False)
        tools.reset([folder / file], VIEW.to_json())
        tools.zoom(picture.where(ASKED))["observation"].save(folder / part, compress_level=1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image(file), {"type": "text", "text": told}]}]
    add_call(messages, "zoom", {"bbox_2d": picture.where(ASKED)}, [image(str(part))])
    return [*messages, {"role": "assistant", "content": task["answer"], "weight": NAME_WEIGHT}]


def give_up(task: dict[str, Any], told: str) -> list[dict[str, Any]]:
    """Return a conversation about a task's picture without zooming."""
    [file] = task["images"]
    return [
        {"role": "user", "content": [image(file), {"type": "text", "text": told}]},
        {"role": "assistant", "content": GIVE_UP},
    ]


def image(file: str) -> dict[str, Any]:
    """Return the part of a message for an image."""
    return {"type": "image_url", "image_url": {"url": file}}


def make_tokenizer(transcripts: list[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with one token for each word, each coordinate, and each of PIECES."""
    calls = [call for messages in transcripts for call in messages[1].get("tool_calls", ())]
    places = [json.dumps(call["function"]["arguments"]["bbox_2d"]) for call in calls]
    said = ["system user assistant tool zoom\n", *PATTERNS]
    template = show_images(BRIEF_TEMPLATE)
    return train_word_tokenizer([*places, *(f"{text} " * 9 for text in said)], PIECES, (), template, SPECIAL, 1000)
