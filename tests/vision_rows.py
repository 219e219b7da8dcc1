"""Handmade rows with images: the images in a store, their tokens expanded as in chains."""

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.image_tokens import Vision
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.token_row import Row, Span

LEAST, MOST = 20, 300
"""Token ids used for text in rows."""


def picture(seed: int, width: int = 150, height: int = 100) -> Image.Image:
    """An image of random colours."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (7, 9, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class Album:
    """A factory of images and rows for a model of tests.vision_models."""

    def __init__(self, model: Path, folder: Path, seed: int = 0) -> None:
        vision = load_vision(str(model))
        self.vision: Vision = vision
        self.store = ImageStore(folder)
        self.draw = random.Random(seed)

    def image(self, width: int, height: int, seed: int = 0) -> tuple[str, tuple[int, int, int]]:
        """Store an image of random colours, and return its digest and grid."""
        image = self.vision.fit(picture(seed, width, height))
        return self.store.put(image), self.vision.grid(image)

    def text(self, count: int) -> list[int]:
        """Draw ids of text."""
        return [self.draw.randrange(LEAST, MOST) for _ in range(count)]

    def row(self, *parts: Any) -> Row:
        """Make a row of ids of context (lists), images (tuples) and turns (numbers of sampled tokens)."""
        row = Row()
        for part in parts:
            if isinstance(part, int):
                row.append_sampled(
                    self.text(part), [self.draw.uniform(-6, -2) for _ in range(part)], [Span("0", 0, part)]
                )
            elif isinstance(part, tuple):
                row.append_context(*self.vision.expand([self.vision.image_token_id], [part]))
            else:
                row.append_context(part)
        return row
