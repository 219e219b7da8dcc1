"""Decodes images from the forms in which data sets, tools and messages hold them."""

import base64
import binascii
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

MOST_PIXELS = 100_000_000
"""Pixels of the largest image that is decoded: a small file may hold a huge one."""


def decode(source: Any, base: Path = Path()) -> Image.Image:
    """Return an image in RGB, turned as its EXIF data says; what is transparent becomes white.

    `source` is a Pillow image, bytes of a file, a path (relative to `base`), a `data:` address, base64 text, or a dict
    with `bytes` or `path`, as data sets have it. Raises ValueError if it is none of these or cannot be decoded;
    addresses on the web are not fetched.
    """
    image = source if isinstance(source, Image.Image) else _open(content_of(source, base))
    try:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's decoders raise these for damaged files
        raise ValueError(f"the image cannot be decoded: {error}") from error


def size_of(source: Any) -> tuple[int, int]:
    """Return the width and height of an image without decoding it; see `decode`. Raises ValueError."""
    return source.size if isinstance(source, Image.Image) else _open(content_of(source)).size


def _open(content: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(content))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be decoded: {error}") from error
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"the image has {image.width} x {image.height} pixels; at most {MOST_PIXELS:,} are possible")
    return image


def content_of(source: Any, base: Path = Path()) -> bytes:
    """Return the bytes of an image's file; see `decode`. Raises ValueError."""
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, dict):
        if source.get("bytes") is not None:
            return content_of(source["bytes"], base)
        if source.get("path") is not None:
            return _read(base / source["path"])
    if isinstance(source, Path):
        return _read(base / source)
    if isinstance(source, str):
        if source.startswith(("http:", "https:")):
            raise ValueError(f"{source[:200]} is on the web; download it, and give its path")
        if source.startswith("data:"):
            return _from_base64(source.partition(",")[2])
        # a path is short; base64 text of an image is not
        if len(source) < 1024:
            return _read(base / source.removeprefix("file://"))
        return _from_base64(source)
    raise ValueError(f"an image is a path, bytes, base64 text or a Pillow image, and not {type(source).__name__}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"the image {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image is not base64: {error}") from error
