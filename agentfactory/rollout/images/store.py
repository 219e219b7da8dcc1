"""The image store of a run: lossless files named by the digest of their pixels; and the files of a row's images."""

import hashlib
import os
import re
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from agentfactory.base.files.disk import writing
from agentfactory.base.files.untrusted_files import open_file, read_file
from agentfactory.tools.images.decode import decode, is_path

_ADDRESS = re.compile("image:([0-9a-f]{32})")
_IMAGE_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ImageStore:
    """A folder of images, `DIGEST.png` in a subfolder named after the digest's first two letters. Several processes may
    use it concurrently. Links below the folder `within` (None: the folder of images) are not followed."""

    def __init__(self, folder: Path, within: Path | None = None) -> None:
        self.folder = folder
        self._within = within or folder

    def put(self, image: Image.Image) -> str:
        """Store an RGB image, unless it is already stored, and return its digest. Raise DiskError if writing fails."""
        digest = digest_of(image)
        path = self.path(digest)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.{os.getpid()}-{id(image)}.new")
            with writing(path):
                image.save(aside, "PNG", compress_level=1)
                aside.replace(path)
        return digest

    def path(self, digest: str) -> Path:
        """Return the path of the image, stored or not. Raise ValueError if `digest` is not a digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not the digest of an image")
        return self.folder / digest[:2] / f"{digest}.png"

    def png(self, digest: str) -> bytes:
        """Return the bytes of an image's file. Raise ValueError if it is not stored."""
        try:
            return read_file(self.path(digest), _IMAGE_BYTES, self._within)
        except OSError as error:
            raise self._lost(digest, error) from error

    def open(self, digest: str) -> BinaryIO:
        """Open an image's file. Raise ValueError if it is not stored."""
        try:
            return open_file(self.path(digest), self._within)
        except OSError as error:
            raise self._lost(digest, error) from error

    def load(self, digest: str) -> Image.Image:
        """Return an image. Raise ValueError if it is not stored, or if its file is damaged."""
        try:
            image = Image.open(BytesIO(self.png(digest)))
            image.load()
        except OSError as error:
            raise ValueError(f"{self.path(digest)} is damaged: {error}") from error
        if digest_of(image) != digest:
            raise ValueError(f"{self.path(digest)} is damaged: its pixels differ from those that were stored")
        return image

    def _lost(self, digest: str, error: OSError) -> ValueError:
        problem = f"the image {digest} cannot be read: {error.strerror}"
        return ValueError(f"{problem}; fix: keep the folder {self.folder} with the run")


def digest_of(image: Image.Image) -> str:
    """Return the digest of an RGB image's size and pixels, 32 hex digits. Raise ValueError for another mode."""
    if image.mode != "RGB":
        raise ValueError(f"got an image of mode {image.mode}; convert it to RGB")
    return hashlib.sha256(b"%dx%d " % image.size + image.tobytes()).hexdigest()[:32]


def url_of(digest: str) -> str:
    """Return the address by which messages refer to a stored image."""
    return f"image:{digest}"


def stored_digest(image: Any) -> str | None:
    """Return the digest in an address that `url_of` returned; None for anything else."""
    return found[1] if isinstance(image, str) and (found := _ADDRESS.fullmatch(image)) else None


def is_file(image: Any) -> bool:
    """Return whether an image of a row is the path of an existing file."""
    return is_path(image) and Path(image).is_file()


def with_files(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row of data with `images` as paths: paths in the data stay, and images given as data become lossless
    files in `folder`. Raise ValueError if an image cannot be decoded."""
    if "images" not in task:
        return task
    store = ImageStore(folder)
    return {**task, "images": [i if is_file(i) else str(store.path(store.put(decode(i)))) for i in task["images"]]}
