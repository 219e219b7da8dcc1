"""Find out a model's image coordinates by asking it for the box of a square in generated pictures."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw

from agentfactory.base.findings import Finding, ok, problem, warning
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.launching.agent import Agent
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.images.families import load_vision, view_of, why_no_images
from agentfactory.rollout.rewards.boxes_and_points import Box, iou, read_box
from agentfactory.rollout.rewards.scoring import prediction_of
from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule

QUESTION = "Where is the red square? Answer with its bounding box as [left, top, right, bottom] alone, without words."
PLACES = ((1500, 1100, 900, 620), (1300, 1700, 300, 1200), (900, 640, 500, 90), (700, 1000, 80, 640))
"""Size of each picture and top left corner of its square, whose numbers differ between coordinate systems."""
SIDE = 240
CLEAR = 0.5
CLOSE = 0.1
"""Least difference of mean IoU between systems: at nearly full size, the pixels of model and file agree."""
_TEMPERATURE, _TOKENS = 0.1, 512


class Picture(NamedTuple):
    """A grey picture with a red square, whose `box` is in pixels."""

    image: Image.Image
    box: Box


def pictures() -> list[Picture]:
    made = []
    for width, height, left, top in PLACES:
        image = Image.new("RGB", (width, height), (200, 200, 200))
        ImageDraw.Draw(image).rectangle((left, top, left + SIDE - 1, top + SIDE - 1), fill=(220, 20, 20))
        made.append(Picture(image, (left, top, left + SIDE, top + SIDE)))
    return made


def scores(asked: Sequence[Picture], answers: Sequence[str], sizes: SizeRule | None) -> dict[Coordinates, float]:
    """Return the mean IoU of the boxes in `answers` by coordinate system; without `sizes`, not for resized images."""
    found = {}
    for way in Coordinates:
        if way is Coordinates.RESIZED and sizes is None:
            continue
        view, total = ModelView(way, sizes), 0.0
        for picture, answer in zip(asked, answers, strict=True):
            if (said := read_box(answer)) is not None:
                left, top, right, bottom = view.to_pixels(said, picture.image.size)
                if left < right and top < bottom:
                    total += iou((left, top, right, bottom), picture.box)
        found[way] = total / len(asked)
    return found


def check_coordinates(recipe: Recipe) -> Iterator[Finding]:
    """Query the model of a running server, and compare its answers with `rollout.coordinates`."""
    subject, model = "coordinates", recipe.model
    if not recipe.server.urls:
        fix = "start one by `agentfactory serve RECIPE`, and set its address, such as server.url=http://127.0.0.1:8000"
        yield problem(subject, "this check needs a running server, but server.url is not set", fix)
        return
    vision = load_vision(model.path, model.min_image_pixels, model.max_image_pixels)
    if vision is None:
        yield problem(subject, why_no_images(model.path), "use a vision-language model")
        return
    asked = pictures()
    answers = run_interruptibly(_ask(recipe, asked))
    for picture, answer in zip(asked, answers, strict=True):
        width, height = picture.image.size
        box = ", ".join(f"{edge:g}" for edge in picture.box)
        yield ok(subject, f"a square at [{box}] of {width} x {height} pixels: {answer.strip()[:100]!r}")
    found = scores(asked, answers, vision.sizes)
    table = ", ".join(f"{way} {score:.2f}" for way, score in found.items())
    best = max(found, key=lambda way: found[way])
    view = view_of(model.path, vision, recipe.rollout.coordinates)
    used = "not known" if view is None else str(view.coordinates)
    if found[best] < CLEAR:
        text = f"the model uses no known image coordinates (mean IoU: {table}); rollout.coordinates is {used}"
        fix = "set rollout.coordinates as its model card says, or take a model that was trained to give coordinates"
        yield warning(subject, text, fix)
    elif view is None or found[view.coordinates] < found[best] - CLOSE:
        text = f"the model uses {best} coordinates (mean IoU: {table}), but rollout.coordinates is {used}"
        yield problem(subject, text, f"rollout.coordinates={best}")
    else:
        yield ok(subject, f"the model uses {used} coordinates (mean IoU: {table}), as rollout.coordinates says")


async def _ask(recipe: Recipe, asked: Sequence[Picture]) -> list[str]:
    rollout = {"temperature": _TEMPERATURE, "max_tokens": _TOKENS, "max_turns": 1, "parser": recipe.rollout.parser}
    server = {"api_key_env": recipe.server.api_key_env, "retry_seconds": 10.0}
    url = recipe.server.urls[0]
    model = recipe.model.model_dump(include={"dtype", "chat_template", "min_image_pixels", "max_image_pixels"})
    async with Agent(url, tokenizer=recipe.model.path, rollout=rollout, server=server, model=model) as agent:
        results = await asyncio.gather(*(agent.run(QUESTION, images=[picture.image]) for picture in asked))
    chains = [result.trajectories[0] for result in results]
    for chain in chains:
        if chain.error is not None:
            raise RuntimeError(chain.error)
    return [prediction_of(chain) for chain in chains]
