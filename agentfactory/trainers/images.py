"""The images of a micro-batch: which are where in its lines, and their pixels, read from the run's store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from agentfactory.rollout.byte_cache import ByteCache
from agentfactory.rollout.images.features import load_processor, pixels_of
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.images.vision import Grid, Vision
from agentfactory.rollout.trajectory import ImageSpan


@dataclass(frozen=True, eq=False)
class Images:
    """The images that a forward pass encodes, each once, and where they are seen."""

    pixels: Float[Tensor, "patches values"]
    grids: Int[Tensor, "images 3"]
    """Each image's patches in time, height and width."""
    places: tuple[int, ...]
    """Number of the image at each place of the input that has one, row by row; empty if the image is only encoded to
    keep a process in step with others."""
    rotary: Int[Tensor, "3 batch length"] | None
    """Rotary positions of the input's tokens; None if nothing is seen."""


KEPT_BYTES = 256 * 2**20
"""Maximum size of the pixels that a process keeps: passes of a step, and rows of a task, have the same images."""


class ImageLoader:
    """Makes the images of micro-batches from the files of a run's store."""

    def __init__(self, model: str, vision: Vision, folder: Path | None) -> None:
        """`folder` is the store's; None if no row has images."""
        self._processor = load_processor(model)
        self._vision = vision
        self._store = ImageStore(folder) if folder is not None else None
        self._kept: ByteCache[str, tuple[Tensor, Tensor]] = ByteCache(KEPT_BYTES)

    def load(self, spans: Sequence[ImageSpan], rotary: Tensor | None, device: torch.device) -> Images:
        """Return the images of `spans`, in the order in which a micro-batch's lines have them. Raises ValueError if one
        is not stored, or has another size than its tokens say."""
        grids = {span.digest: span.grid for span in spans}
        numbers = {digest: number for number, digest in enumerate(grids)}
        read = [self._read(digest, grid) for digest, grid in grids.items()]
        return _images(read, tuple(numbers[span.digest] for span in spans), rotary, device)

    def load_block(self, length: int, rows: Sequence[Sequence[ImageSpan]], device: torch.device) -> Images | None:
        """Return the images of rows of `length` tokens each, one below the other; None if they have none."""
        spans = [span for row in rows for span in row]
        rotary = np.stack([self._vision.positions(length, row) for row in rows], axis=1)
        return self.load(spans, torch.from_numpy(rotary), device) if spans else None

    def blank(self, device: torch.device) -> Images:
        """Return an image of one token that is nowhere in the input: the vision tower's collective calls are made on
        processes without images, too."""
        side = self._vision.patch_size * self._vision.merge_size
        picture = Image.new("RGB", (side, side))
        return _images([pixels_of(self._processor, [picture])], (), None, device)

    def _read(self, digest: str, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the patches of one image, and their numbers, as pixels_of does."""
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        if self._store is None:
            raise ValueError(f"the rows have the image {digest}, and the run has no folder of images")
        picture = self._store.load(digest)
        if self._vision.grid(picture) != grid:
            raise ValueError(f"the image {digest} has {picture.size} pixels, which are not its {grid} patches")
        made = pixels_of(self._processor, [picture])
        self._kept.put(digest, made, made[0].nbytes)
        return made


def _images(
    read: Sequence[tuple[Tensor, Tensor]], places: tuple[int, ...], rotary: Tensor | None, device: torch.device
) -> Images:
    pixels, grids = (torch.cat(parts) for parts in zip(*read, strict=True))
    return Images(pixels.to(device), grids.to(device), places, None if rotary is None else rotary.to(device))


def images_beside(saved: Path) -> Path:
    """Return the folder of the images of saved groups, a file or a folder of files: in the run's folder, which has
    them in `trajectories`, or beside the file."""
    folder = saved if saved.is_dir() else saved.parent
    return (folder.parent if folder.name == "trajectories" else folder) / "images"


def merge_keys(
    rows: Sequence[Int[np.ndarray, "tokens"]], images: Sequence[Sequence[ImageSpan]]
) -> list[Int[np.ndarray, "tokens"]]:
    """Return, in place of each row's ids, keys that are equal where the same is seen: an image's tokens, which have the
    same id in every image, have its number, below 0."""
    numbers: dict[str, int] = {}
    keys = []
    for ids, spans in zip(rows, images, strict=True):
        if spans:
            ids = ids.copy()
        for span in spans:
            ids[span.offset : span.offset + span.length] = ~numbers.setdefault(span.digest, len(numbers))
        keys.append(ids)
    return keys
