"""Decoding of images from data sets, tools and messages."""

import base64
import binascii
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from agentfactory.base.files.untrusted_files import open_file

_LONGEST_PATH = 1024
"""Maximum characters of a path; longer text is an image in base64."""
_ADDRESSES = ("data:", "http:", "https:", "image:")
_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Beginnings of PNG, JPEG, GIF and WebP files in base64, which may be as short as a path."""
MOST_PIXELS = 100_000_000
"""Maximum pixels of a decoded image: a small file may hold a huge one."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = tuple(_TURNS[orientation] for orientation in (5, 6, 7, 8))


def is_path(image: Any) -> bool:
    """Return whether an image is given as a path, rather than as a URL or base64."""
    if not isinstance(image, str):
        return isinstance(image, Path)
    return len(image) < _LONGEST_PATH and not image.startswith((*_ADDRESSES, *_IN_BASE64))


def decode(source: Any, base: Path = Path()) -> Image.Image:
    """Decode an image to RGB, turned upright by its EXIF data. Transparency becomes white; of an animation, the first
    frame is used. `source` is a Pillow image, bytes of a file, a path (relative to `base`), a `data:` URL, base64 text,
    or a dict with `bytes` or `path`, as in data sets; web addresses are not fetched. Raises ValueError."""
    name = _name_of(source)
    image = source if isinstance(source, Image.Image) else _open(BytesIO(content_of(source, base)), name)
    try:
        image.load()
        # Pillow's own exif_transpose also rewrites the EXIF data, and fails for data that it cannot write
        image = image if (turn := _turn_of(image)) is None else image.transpose(turn)
        if image.mode.startswith("I;16"):
            # keep the upper 8 bits, as Pillow does for 16-bit colour; its own conversion makes nearly everything white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels are numbers of 32 bits ({image.mode}); save it with 8 or 16 bits per colour")
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # boundary: each of Pillow's decoders raises others for damaged files
        raise ValueError(f"{name} cannot be decoded: {error}") from error


def size_of(source: Any) -> tuple[int, int]:
    """Return the (width, height) of the image that `decode` returns, without decoding it. Raises ValueError."""
    if isinstance(source, Image.Image):
        return _upright_size(source)
    if (path := _path_of(source, Path())) is None:
        return _upright_size(_open(BytesIO(content_of(source)), _name_of(source)))
    try:
        with open_file(path) as file:
            return _upright_size(_open(file, _name_of(source)))
    except OSError as error:
        raise _unreadable(path, error) from error


def _name_of(source: Any) -> str:
    path = _path_of(source, Path()) if isinstance(source, dict | Path | str) else None
    return "the image" if path is None else f"the image {path}"


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _turn_of(image) in _QUARTER_TURNS else (width, height)


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(0x0112, 1))  # the tag Orientation
    except Exception:  # boundary: damaged EXIF data raises anything, and viewers show such an image unturned
        return None


def _open(file: BinaryIO, name: str) -> Image.Image:
    try:
        image = Image.open(file)
    except UnidentifiedImageError as error:
        kinds = "PNG, JPEG, WebP, GIF, TIFF and BMP are possible"
        raise ValueError(f"{name} is damaged, or of a kind that cannot be decoded; {kinds}") from error
    except Exception as error:  # boundary: each of Pillow's decoders raises others for damaged files
        raise ValueError(f"{name} cannot be decoded: {error}") from error
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{name} has {image.width} x {image.height} pixels; at most {MOST_PIXELS:,} are possible")
    return image


def content_of(source: Any, base: Path = Path()) -> bytes:
    """Return the bytes of an image's file; see `decode`. Raises ValueError."""
    if (path := _path_of(source, base)) is not None:
        try:
            with open_file(path) as file:
                return file.read()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, dict) and source.get("bytes") is not None:
        return content_of(source["bytes"], base)
    if isinstance(source, str):
        if source.startswith(("http:", "https:")):
            raise ValueError(f"{source[:200]} is on the web; download it, and give its path")
        try:
            text = source.partition(",")[2] if source.startswith("data:") else source
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the image is not base64: {error}") from error
    raise ValueError(f"an image is a path, bytes, base64 text or a Pillow image, and not {type(source).__name__}")


def _path_of(source: Any, base: Path) -> Path | None:
    if isinstance(source, dict) and source.get("bytes") is None:
        source = source.get("path")
    return base / str(source).removeprefix("file://") if is_path(source) else None


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"the image {path} cannot be read: {getattr(error, 'strerror', None) or error}")
