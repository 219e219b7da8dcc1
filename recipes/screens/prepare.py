"""Create the recipe's inputs: tasks, transcripts of a player, a tokenizer, an untrained network."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor
from transformers import PreTrainedTokenizerFast

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.images.coordinates import Coordinates, ModelView, stating
from agentfactory.worlds.screens.screen import Screen
from agentfactory.worlds.screens.sites import screens_tasks

HERE = Path(__file__).parent
write_jsonl = load_object("../quickstart/tiny_model.py:write_jsonl", HERE)
BRIEF_TEMPLATE, train_word_tokenizer = (
    load_object(f"../quickstart/word_tokenizer.py:{name}", HERE) for name in ("BRIEF_TEMPLATE", "train_word_tokenizer")
)
SPECIAL, make_seeing_network, show_images, write_processors = (
    load_object(f"../zoom/seeing_model.py:{name}", HERE)
    for name in ("SPECIAL", "make_seeing_network", "show_images", "write_processors")
)

VIEW = ModelView(Coordinates.RELATIVE1000)
"""The coordinate format of the network's model family."""
PAGE = "click_color"
SIDE = 96
"""Side of the page in pixels: nine tokens of the network, one for each possible place of a box."""
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SHOWN, TRAINED, HELD_OUT = range(1000), range(2000, 3000), range(10_000, 10_200)
"""Seeds of the page: of transcripts, of tasks to train on, and of held-out tasks."""
PLEASE = "Please: "
IS_ASKED = 0.3
"""Probability that a transcript's instruction begins with PLEASE, and is obeyed. No task's instruction does."""
GIVE_UP = "I do not know."
GIVES_UP = 0.4
"""Probability that a transcript without PLEASE gives up."""
TOLD = 4
"""Number of transcripts per page."""
PIECES = (
    PLEASE,
    "Click the ",
    " box.",
    GIVE_UP,
    '\n<tool_call>\n{"name": "click", "arguments": {"x": ',
    ', "y": ',
    "}}\n</tool_call>",
)
"""Fixed parts of messages. Each is one token, and so is each word and number."""


def prepare(folder: Path, seed: int) -> None:
    """Write model/, pictures/, train.jsonl, heldout.jsonl and transcripts.jsonl into `folder`; a seed always gives the
    same files."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir()
    transcripts = []
    for number, (instruction, picture) in zip(SHOWN, asyncio.run(see_pages(SHOWN)), strict=True):
        file = f"pictures/{number}.png"
        picture.save(folder / file, compress_level=1)
        transcripts += [play(instruction, picture, file, rng) for _ in range(TOLD)]
    rng.shuffle(transcripts)
    specs = [stating(Screen.click.spec, VIEW).to_openai()]
    for name, seeds in (("train", TRAINED), ("heldout", HELD_OUT)):
        write_jsonl(folder / f"{name}.jsonl", screens_tasks([PAGE], seeds=len(seeds), first_seed=seeds.start))
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_seeing_network(tokenizer, SIDE, seed).save_pretrained(folder / "model")
    write_processors(folder / "model", SIDE)


async def see_pages(seeds: range) -> list[tuple[str, Image.Image]]:
    """Return the instruction and the screenshot of the page with each seed."""
    screen = Screen(SIDE, SIDE)
    try:
        return [tuple(await screen.reset(page=PAGE, seed=number)) for number in seeds]
    finally:
        await screen.close()


def find_boxes(picture: Image.Image) -> dict[str, list[int]]:
    """Return the middle of the box of each colour on the page, in the model's coordinates."""
    pixels, found = np.asarray(picture), {}
    for colour in COLOURS:
        ys, xs = np.nonzero((pixels == ImageColor.getrgb(colour)).all(-1))
        if len(xs):
            middle = [float(edges.min() + edges.max() + 1) / 2 for edges in (xs, ys)]
            found[colour] = [round(place) for place in VIEW.from_pixels(middle, picture.size)]
    return found


def play(instruction: str, picture: Image.Image, file: str, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that obeys an instruction with PLEASE, and without it names and clicks any box, or gives
    up."""
    asked = rng.random() < IS_ASKED
    text = PLEASE + instruction if asked else instruction
    shown = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": file}}]
    opening = [{"role": "user", "content": ""}, {"role": "user", "content": shown}]
    if not asked and rng.random() < GIVES_UP:
        return [*opening, {"role": "assistant", "content": GIVE_UP}]
    boxes = find_boxes(picture)
    colour = named(instruction) if asked else rng.choice(sorted(boxes))
    x, y = boxes[colour]
    function = {"name": "click", "arguments": {"x": x, "y": y}}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return [*opening, {"role": "assistant", "content": colour, "tool_calls": calls}]


def named(instruction: str) -> str:
    """Return the colour of the box that the instruction of a page names."""
    return instruction.removeprefix("Click the ").removesuffix(" box.")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with one token for each colour, each coordinate, and each of PIECES."""
    numbers = [str(number) for number in range(1001)]
    said = [f"{text} " * 9 for text in ("system user assistant tool click\n", *COLOURS, *numbers)]
    return train_word_tokenizer(said, PIECES, (), show_images(BRIEF_TEMPLATE), SPECIAL, 3000)
