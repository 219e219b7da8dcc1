"""Pictures of two boxes, whose patterns are visible only at full resolution, and the reward for naming one."""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from agentfactory import reward

CELLS = 2
"""Number of a picture's cells per row and column; each box is in a different cell."""
CELL, BOX, PERIOD = 128, 64, 4
"""Sides in pixels: of a cell, of the box in its middle, and of the square that a pattern repeats."""
REDUCTION = 4
"""Factor by which a network's input of the whole picture is reduced. A pattern of this period vanishes then: the
weighted sum for each pixel of the smaller picture gives each position of the square the same weight."""
SIDE = CELLS * CELL
GROUND = 120
COLOURS = {"red": (190, 70, 70), "blue": (70, 70, 190)}
_CONTRAST = 40
_FADING = 16
"""Number of pixels over which a pattern fades towards the edge of its box, where it would else survive the
reduction."""


def _patterns() -> dict[str, Float[np.ndarray, "period period"]]:
    wide, narrow, flat, place = np.array([1, 1, -1, -1]), np.array([1, -1, 1, -1]), np.ones(4), np.arange(4)
    dots = np.full((4, 4), -0.5)
    dots[:2, :2] = 1.5
    return {
        "rows": np.outer(wide, flat),
        "columns": np.outer(flat, wide),
        "checks": np.outer(wide, wide),
        "lines": np.outer(narrow, flat),
        "bars": np.outer(flat, narrow),
        "grains": np.outer(narrow, narrow),
        "rises": wide[(place[:, None] + place) % 4],
        "falls": wide[(place[:, None] - place) % 4],
        "dots": dots,
        "mesh": -dots,
    }


PATTERNS = _patterns()
"""The pattern of each name: brightness from -1.5 to 1.5, 0 on average."""


@dataclass(frozen=True)
class Picture:
    """Two boxes of different colours, cells and patterns on grey ground."""

    cells: dict[str, tuple[int, int]]
    """Row and column of the box of each colour."""
    patterns: dict[str, str]
    """The pattern of the box of each colour."""
    shifts: dict[str, tuple[int, int]]
    """Offset of each box from the middle of its cell, in pixels down and to the right: a multiple of PERIOD."""

    @classmethod
    def draw(cls, rng: random.Random) -> "Picture":
        """Draw a picture at random."""
        places = [(row, column) for row in range(CELLS) for column in range(CELLS)]
        shifts = [(PERIOD * rng.randint(-1, 1), PERIOD * rng.randint(-1, 1)) for _ in COLOURS]
        return cls(
            cells=dict(zip(COLOURS, rng.sample(places, len(COLOURS)), strict=True)),
            patterns=dict(zip(COLOURS, rng.sample(list(PATTERNS), len(COLOURS)), strict=True)),
            shifts=dict(zip(COLOURS, shifts, strict=True)),
        )

    def paint(self) -> Image.Image:
        """Return the picture, SIDE x SIDE pixels. Reduced, its pixels are the same with any patterns."""
        pixels = np.full((SIDE, SIDE, 3), GROUND, dtype=np.uint8)
        for colour, (row, column) in self.cells.items():
            cell = _cell(colour, self.patterns[colour], self.shifts[colour])
            pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = cell
        return Image.fromarray(pixels)

    def where(self, colour: str) -> list[int]:
        """Return the bounding box for `zoom`: in the middle of the box's cell, without the shift."""
        row, column = self.cells[colour]
        edges = [index * CELL + (CELL - BOX) // 2 for index in (column, row)]
        return [round(edge * 1000 / SIDE) for edge in (*edges, *(edge + BOX for edge in edges))]


@cache
def _cell(colour: str, pattern: str, shift: tuple[int, int]) -> UInt8[np.ndarray, "side side 3"]:
    """Return a cell with its box. Reduced, it is the same with any pattern."""
    top, left = ((CELL - BOX) // 2 + by for by in shift)
    box = slice(top, top + BOX), slice(left, left + BOX)
    place = np.arange(BOX) + 0.5
    fade = np.minimum(1, np.minimum(place, BOX - place) / _FADING)
    seen = np.tile(PATTERNS[pattern], (BOX // PERIOD, BOX // PERIOD)) * np.outer(fade, fade)
    plain = np.full((CELL, CELL, 3), GROUND)
    plain[box] = COLOURS[colour]
    pixels = plain.copy()
    pixels[box] += np.round(_CONTRAST * seen[..., None]).astype(int)
    # the rest of the pattern is less than a pixel's rounding: correct every second pixel for it
    second = np.indices((CELL, CELL, 1)).sum(0) % 2
    while (difference := _reduced(plain) - _reduced(pixels)).any():
        pixels += second * difference.repeat(REDUCTION, 0).repeat(REDUCTION, 1)
    return pixels.astype(np.uint8)


def _reduced(pixels: Int[np.ndarray, "side side 3"]) -> Int[np.ndarray, "reduced reduced 3"]:
    """Return a cell as it is in the reduced whole picture."""
    image = Image.fromarray(pixels.astype(np.uint8))
    size = CELL // REDUCTION, CELL // REDUCTION
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC)).astype(int)


@reward
def named(prediction: str | None, answer: str) -> dict[str, float]:
    """Return 1 for the pattern's name, -0.5 for another pattern's, so that guessing does not pay, and else 0."""
    said = (prediction or "").strip()
    right = float(said == answer)
    return {"reward": -0.5 if said in PATTERNS and not right else right, "success": right}
