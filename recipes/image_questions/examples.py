"""Generated charts, pages and scenes with questions, to try the recipes without a download: `data.source` names one."""

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw, ImageFont

PROMPT_OPTIONS = "Answer with the option's letter from the given choices directly."
_WORDS = ("north", "lamp", "river", "copper", "garden", "violin", "harbor", "winter", "saddle", "ribbon")
_COLOURS = ("red", "green", "blue", "orange", "purple")


def charts(count: int = 8, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield bar charts, with the question of one bar's value."""
    rng = random.Random(seed)
    for _ in range(count):
        names, values = rng.sample(_WORDS, 4), rng.sample(range(10, 100), 4)
        image, pencil = _sheet(640, 420)
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            left = 60 + 140 * place
            pencil.rectangle((left, 370 - 3 * value, left + 80, 370), fill=_COLOURS[place])
            pencil.text((left, 380), name, fill="black", font=_font(18))
            pencil.text((left + 25, 345 - 3 * value), str(value), fill="black", font=_font(18))
        yield {"question": f"What is the value of {names[0]}?", "images": [image], "answer": [str(values[0])]}


def documents(count: int = 8, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield pages, with a question about a line of small print."""
    rng = random.Random(seed)
    for number in range(count):
        image, pencil = _sheet(1240, 1754)
        words = rng.sample(_WORDS, 3)
        for line in range(30):
            text = " ".join(rng.choices(_WORDS, k=9))
            pencil.text((120, 150 + 50 * line), text, fill="black", font=_font(20))
        pencil.text((120, 1690), f"Filed under: {' '.join(words)} {number}", fill="black", font=_font(14))
        yield {"question": "What was it filed under?", "images": [image], "answer": [f"{' '.join(words)} {number}"]}


def scenes(count: int = 8, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield wide scenes with a small square, the question of its colour with options, and its box in pixels."""
    rng = random.Random(seed)
    for _ in range(count):
        image, pencil = _sheet(2400, 1600)
        for _ in range(40):
            x, y, radius = rng.randrange(2400), rng.randrange(1600), rng.randrange(20, 160)
            grey = rng.randrange(80, 200)
            pencil.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(grey, grey, grey))
        colours = rng.sample(_COLOURS, 4)
        right, side = rng.randrange(4), 40
        left, top = rng.randrange(2400 - side), rng.randrange(1600 - side)
        pencil.rectangle((left, top, left + side - 1, top + side - 1), fill=colours[right])
        options = "\n".join(f"({letter}) {colour}" for letter, colour in zip("ABCD", colours, strict=True))
        yield {
            "question": f"What is the color of the square?\n{options}\n{PROMPT_OPTIONS}",
            "images": [image],
            "answer": "ABCD"[right],
            "box": [left, top, left + side, top + side],
        }


def _sheet(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (width, height), "white")
    return image, ImageDraw.Draw(image)


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
