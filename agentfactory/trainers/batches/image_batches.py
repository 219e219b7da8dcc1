"""The images of a micro-batch: their positions in its lines, and their pixels, read from the run's store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from agentfactory.rollout.images.features import Inputs, PixelMaker, join
from agentfactory.rollout.images.image_tokens import Grid, Vision
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.tools.images.lru_cache import ByteCache


@dataclass(frozen=True, eq=False)
class Images:
    """The images that a forward pass encodes, each once, and their positions in the input."""

    inputs: Inputs
    """Pixels, and the network's other inputs for images."""
    counts: tuple[int, ...]
    places: tuple[int, ...]
    """Index of the image at each image position of the input, row by row; empty for an image without a position."""
    rotary: Int[Tensor, "3 batch length"] | None
    """Rotary positions of the input's tokens; None if it has no images, or the model numbers tokens consecutively."""


KEPT_BYTES = 256 * 2**20
"""Maximum size of a process's pixel cache: passes of a step, and rows of a task, have the same images."""


class ImageLoader:
    """A loader of images for micro-batches from the ImageStore in `folder`; None if no row has images."""

    def __init__(self, model: str, vision: Vision, folder: Path | None) -> None:
        self._maker = PixelMaker(model, vision)
        self._vision = vision
        self._store = ImageStore(folder) if folder is not None else None
        self._kept: ByteCache[str, Inputs] = ByteCache(KEPT_BYTES)

    def load(self, spans: Sequence[ImageSpan], rotary: Tensor | None, device: torch.device) -> Images:
        """Return the images of `spans`. Raises ValueError if one is not stored, or does not match its tokens."""
        grids = {span.digest: span.grid for span in spans}
        numbers = {digest: number for number, digest in enumerate(grids)}
        read = [self._read(digest, grid) for digest, grid in grids.items()]
        places = tuple(numbers[span.digest] for span in spans)
        moved = None if rotary is None else rotary.to(device)
        return Images(*self._inputs(read, [*grids.values()], device), places, moved)

    def load_block(self, length: int, rows: Sequence[Sequence[ImageSpan]], device: torch.device) -> Images | None:
        """Return the images of rows of `length` tokens each, one below the other; None if they have none."""
        spans = [span for row in rows for span in row]
        positions = [found for row in rows if (found := self._vision.positions(length, row)) is not None]
        rotary = torch.from_numpy(np.stack(positions, axis=1)) if positions else None
        return self.load(spans, rotary, device) if spans else None

    def blank(self, device: torch.device) -> Images:
        """Return a small image without a position, for processes without images: they take part in collective calls."""
        grid = self._vision.smallest()
        return Images(*self._inputs([self._maker.make(self._vision.blank(grid))], [grid], device), (), None)

    def _inputs(self, read: list[Inputs], grids: list[Grid], device: torch.device) -> tuple[Inputs, tuple[int, ...]]:
        inputs = {name: value.to(device) for name, value in join(read).items()}
        return inputs, tuple(self._vision.features(grid) for grid in grids)

    def _read(self, digest: str, grid: Grid) -> Inputs:
        if (kept := self._kept.get(digest)) is not None:
            return kept
        if self._store is None:
            raise ValueError(f"the rows have the image {digest}, and the run has no folder of images")
        picture = self._store.load(digest)
        if self._vision.grid(picture) != grid:
            raise ValueError(f"the image {digest} has {picture.size} pixels, which do not match {grid}")
        made = self._maker.make(picture)
        self._kept.put(digest, made, sum(value.nbytes for value in made.values()))
        return made


def images_beside(saved: Path) -> Path:
    """Return the image folder of saved groups: in the run's folder, for its `trajectories`, else beside them."""
    folder = saved if saved.is_dir() else saved.parent
    return (folder.parent if folder.name == "trajectories" else folder) / "images"


def merge_keys(
    rows: Sequence[Int[np.ndarray, "tokens"]], images: Sequence[Sequence[ImageSpan]]
) -> list[Int[np.ndarray, "tokens"]]:
    """Return keys that replace each row's ids in comparisons of prefixes: an image token's key is its image's number,
    below 0, since its id is the same in every image."""
    numbers: dict[str, int] = {}
    keys = []
    for ids, spans in zip(rows, images, strict=True):
        if spans:
            ids = ids.copy()
        for span in spans:
            ids[span.offset : span.offset + span.length] = ~numbers.setdefault(span.digest, len(numbers))
        keys.append(ids)
    return keys
