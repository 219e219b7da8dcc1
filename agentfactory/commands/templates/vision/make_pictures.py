"""Draw the pictures and write their rows: run `python make_pictures.py` in this folder after a change."""

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

CLOTHS = ("bands", "checks", "diagonals", "dots", "plain", "stripes")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
QUESTION = f"Which cloth is in the {{}} corner: {', '.join(CLOTHS[:-1])} or {CLOTHS[-1]}?"
SIDE, CLOTH, THREAD = 512, 128, 4
"""Pixels: sides of a picture and of a piece of cloth, and the width of a thread. Threads vanish in the reduced
picture."""
PICTURES, HELD_OUT = 250, 25
"""Number of pictures, and the number of them for evaluation only. Each has a row per corner."""


def draw(cloth: str, rng: random.Random) -> Image.Image:
    """Return a piece of cloth, in a random light and dark colour."""
    down, right = np.indices((CLOTH, CLOTH)) // THREAD
    dark = {
        "bands": down % 2 == 1,
        "checks": (down + right) % 2 == 1,
        "diagonals": (down + right) % 4 < 2,
        "dots": (down % 2 == 1) & (right % 2 == 1),
        "plain": down < 0,
        "stripes": right % 2 == 1,
    }
    colours = [[rng.randint(low, low + 80) for _ in "rgb"] for low in (170, 10)]
    return Image.fromarray(np.where(dark[cloth][..., None], colours[1], colours[0]).astype(np.uint8))


def make(folder: Path, seed: int = 0) -> None:
    """Write pictures/, tasks.jsonl and heldout.jsonl into `folder`; a seed always gives the same files."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number in range(PICTURES):
        picture = Image.new("RGB", (SIDE, SIDE), "grey")
        file = f"pictures/{number:03}.png"
        for corner, cloth in zip(CORNERS, rng.sample(CLOTHS, len(CORNERS)), strict=True):
            place = [0 if side in corner else SIDE - CLOTH for side in ("left", "top")]
            picture.paste(draw(cloth, rng), (place[0], place[1]))
            rows.append({"question": QUESTION.format(corner), "images": [file], "corner": corner, "answer": cloth})
        picture.save(folder / file)
    held_out = HELD_OUT * len(CORNERS)
    for name, part in (("heldout.jsonl", rows[:held_out]), ("tasks.jsonl", rows[held_out:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    make(Path(__file__).parent)
