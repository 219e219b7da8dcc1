"""Image decoding: supported formats, refusals and their messages, damaged files."""

import random
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentfactory.tools.images.decode import decode, size_of
from tests.vision_rows import file_of

PIXELS = np.random.default_rng(0).integers(0, 255, (24, 30, 3), dtype=np.uint8)


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bits_keep_their_brightness():
    grey = png(4, 2, 16, 0, (b"\0" + struct.pack(">4H", 0, 0x4000, 0x8000, 0xFFFF)) * 2)
    colour = png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0xFFFF, 0x8000, 0x1000))
    assert np.asarray(decode(grey))[0].tolist() == [[v] * 3 for v in (0, 0x40, 0x80, 0xFF)]
    assert np.asarray(decode(colour)).tolist() == [[[0xFF, 0x80, 0x10]]]


def test_an_image_with_damaged_exif_data_is_shown_as_it_is_stored():
    image, exif = Image.fromarray(PIXELS), Image.Exif()
    exif[0x0112] = 6
    content = file_of(image, "WEBP", exif=exif, lossless=True)
    assert np.array_equal(np.asarray(decode(content)), np.asarray(image.transpose(Image.Transpose.ROTATE_270)))
    damaged = content.replace(b"MM\0*", b"XX\0*").replace(b"II*\0", b"XX*\0")
    assert damaged != content
    assert np.array_equal(np.asarray(decode(damaged)), PIXELS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is damaged, or of a kind that cannot be decoded; PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is damaged, or of a kind that cannot be decoded; PNG"),
        (png(60_000, 60_000, 8, 2, b""), "3600000000 pixels"),
        (png(12_000, 9_000, 8, 2, b""), "has 12000 x 9000 pixels; at most 100,000,000 are possible"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_decoded_is_refused_by_its_header_and_named(tmp_path, content, problem):
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    for read in (size_of, decode):
        with pytest.raises(ValueError, match=f"the image {path} .*{problem}"):
            read(str(path))
        with pytest.raises(ValueError, match=f"the image .*{problem}"):
            read(content)


def test_damaged_files_are_value_errors(tmp_path: Path):
    image, exif = Image.fromarray(PIXELS), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "words"
    files = [file_of(image, kind) for kind in ("GIF", "BMP", "TIFF", "PPM", "ICO", "TGA", "AVIF")]
    files += [file_of(image, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    draw, refused = random.Random(0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1000):
            content = bytearray(draw.choice(files))
            for _ in range(draw.choice([1, 2, 9])):
                content[draw.randrange(min(len(content), draw.choice([64, 200, 9999])))] = draw.choice([0, 1, 255])
            for read in (size_of, decode):
                try:
                    read(bytes(content))
                except ValueError:
                    refused += 1
    assert refused > 300


def test_the_size_is_that_of_the_image_turned_upright() -> None:
    image = Image.new("RGB", (40, 30))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = file_of(image, "JPEG", exif=exif)
        assert size_of(content) == decode(content).size
