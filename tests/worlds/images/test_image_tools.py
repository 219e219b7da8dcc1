"""The image tools against independent references: fractions, numpy and transformers."""

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from agentfactory.tools.images.coordinates import Coordinates, ModelView, SizeRule
from agentfactory.worlds.images.image_tools import ImageTools

TOKEN, LEAST_PIXELS, MOST_PIXELS = 28, 4 * 28 * 28, 64 * 28 * 28
RULE = SizeRule(TOKEN, LEAST_PIXELS, MOST_PIXELS)
TRIALS = 200
Size = tuple[int, int]


def units(coordinates: str, size: Size) -> Size:
    """The model's coordinates of an image's right and bottom edges."""
    if coordinates == "resized":
        height, width = smart_resize(size[1], size[0], TOKEN, LEAST_PIXELS, MOST_PIXELS)
        return width, height
    return {"pixels": size, "relative1000": (1000, 1000), "relative1": (1, 1)}[coordinates]


def stated(pixels: list[float], coordinates: str, size: Size) -> list[float]:
    unit = units(coordinates, size)
    return [float(Fraction(pixel) * unit[axis % 2] / size[axis % 2]) for axis, pixel in enumerate(pixels)]


def cut(box: list[float], coordinates: str, size: Size) -> list[int] | None:
    """The part of an image that a box selects, at least one token per side; None if the box lies outside the image."""
    unit = units(coordinates, size)
    sides = []
    for axis, length in enumerate(size):
        first, last = (Fraction(box[axis + end]) * length / unit[axis] for end in (0, 2))
        first, last = max(first, Fraction(0)), min(last, Fraction(length))
        if first >= last:
            return None
        start, end = round(first), round(last)  # half to even
        if end - start < min(TOKEN, length):
            # the center stays, unless an edge of the image is in the way
            start = (start + end - min(TOKEN, length)) // 2
            start = max(0, min(start, length - TOKEN))
            end = min(start + TOKEN, length)
        sides.append((start, end))
    return [sides[0][0], sides[1][0], sides[0][1], sides[1][1]]


def shown(pixels: np.ndarray) -> np.ndarray:
    height, width = smart_resize(*pixels.shape[:2], TOKEN, LEAST_PIXELS, MOST_PIXELS)
    if (height, width) == pixels.shape[:2]:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def tools(pixels: np.ndarray, coordinates: str | None = None) -> ImageTools:
    made = ImageTools()
    view = None if coordinates is None else ModelView(Coordinates(coordinates), RULE).to_json()
    made.reset([Image.fromarray(pixels)], view)
    return made


def seen(result: dict[str, Any]) -> np.ndarray:
    return np.asarray(result["observation"][-1])


def told(result: dict[str, Any]) -> str:
    return result["observation"][0]


def images(trials: int, most: int = 300) -> Iterator[tuple[np.random.Generator, np.ndarray, Size]]:
    rng = np.random.default_rng(0)
    for _ in range(trials):
        width, height = (int(side) for side in rng.integers(20, most, 2))
        yield rng, rng.integers(0, 256, (height, width, 3), dtype=np.uint8), (width, height)


def coded(width: int, height: int) -> np.ndarray:
    """An image whose pixels encode their position: x in red, y in green."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    return pixels


@pytest.mark.slow
@pytest.mark.parametrize("coordinates", list(Coordinates))
def test_zoom_shows_what_the_box_says(coordinates: str) -> None:
    counted = {"shown": 0, "refused": 0, "cut": 0, "grown": 0}
    for rng, pixels, size in images(TRIALS):
        unit = units(coordinates, size)
        # a tenth of the boxes extend beyond the image, some of them completely
        edges = np.sort(rng.uniform(-0.15, 1.15, (2, 2)), axis=1) if rng.random() < 0.5 else np.sort(rng.random((2, 2)))
        box = [float(edges[axis, end] * unit[axis]) for end in (0, 1) for axis in (0, 1)]
        if coordinates != "relative1":
            box = [float(round(edge)) for edge in box]
        part = cut(box, coordinates, size) if box[0] < box[2] and box[1] < box[3] else None
        tool = tools(pixels, coordinates)
        if part is None:
            with pytest.raises(ValueError, match="bbox_2d"):
                tool.zoom(box)
            counted["refused"] += 1
            continue
        left, top, right, bottom = part
        result = tool.zoom(box)
        assert np.array_equal(seen(result), shown(pixels[top:bottom, left:right]))
        assert result["box"] == part
        assert (result["of"], result["image"], result["size"]) == (0, 1, size)
        counted["shown"] += 1
        counted["cut"] += "reached out" in told(result)
        counted["grown"] += "too small" in told(result)
    assert counted["shown"] > 0.8 * TRIALS
    assert min(counted.values()) > 3


@pytest.mark.slow
def test_one_box_is_the_same_part_in_all_coordinates() -> None:
    for rng, pixels, size in images(TRIALS):
        (left, right), (top, bottom) = (np.sort(rng.choice(side + 1, 2, replace=False)) for side in size)
        box = [int(left), int(top), int(right), int(bottom)]
        results = [tools(pixels, way).zoom(stated(box, way, size)) for way in Coordinates]
        assert all(result["box"] == results[0]["box"] for result in results)
        assert all(np.array_equal(seen(result), seen(results[0])) for result in results)
        if right - left >= TOKEN and bottom - top >= TOKEN:
            assert results[0]["box"] == box


@pytest.mark.parametrize("coordinates", list(Coordinates))
def test_what_the_model_states_comes_back(coordinates: str) -> None:
    view = ModelView(Coordinates(coordinates), RULE)
    for rng, _, size in images(TRIALS):
        places = [float(number) for number in rng.uniform(-50, 400, 6)]
        assert view.from_pixels(places, size) == pytest.approx(stated(places, coordinates, size), rel=1e-12)
        assert view.to_pixels(view.from_pixels(places, size), size) == pytest.approx(places, rel=1e-12)
    assert ModelView.of(view.to_json()) == view


@pytest.mark.slow
def test_parts_of_parts_know_where_they_are() -> None:
    rng = random.Random(0)
    for _ in range(TRIALS):
        tool = tools(coded(rng.randint(60, 250), rng.randint(60, 250)))
        number = 0
        for _ in range(rng.randint(1, 5)):
            width, height = tool._pictures[number].size
            match rng.choice(["zoom", "zoom", "rotate", "flip"]):
                case "zoom":
                    left, top = rng.randint(0, width - 1), rng.randint(0, height - 1)
                    box = [left, top, rng.randint(left + 1, width), rng.randint(top + 1, height)]
                    result = tool.zoom(box, number)
                case "rotate":
                    result = tool.rotate(rng.choice([0, 90, 180, 270, -90, 450]), number)
                case _:
                    result = tool.flip(rng.choice(["left_right", "top_bottom"]), number)
            number = result["image"]
            pixels = seen(result)
            (left, top), (right, bottom) = pixels[..., :2].min((0, 1)), pixels[..., :2].max((0, 1))
            assert result["box"] == [left, top, right + 1, bottom + 1]
            # points of the part map to the same pixels of the whole image
            x, y = rng.randrange(pixels.shape[1]), rng.randrange(pixels.shape[0])
            back = tool._pictures[number].back.of((x + 0.5, y + 0.5))
            assert back == pytest.approx(pixels[y, x, :2] + 0.5)


def test_quarters_and_mirrors_move_each_pixel() -> None:
    for rng, pixels, _ in images(TRIALS, most=80):
        quarters = int(rng.integers(-4, 8))
        assert np.array_equal(seen(tools(pixels).rotate(90 * quarters)), np.rot90(pixels, -quarters))
        assert np.array_equal(seen(tools(pixels).flip("left_right")), pixels[:, ::-1])
        assert np.array_equal(seen(tools(pixels).flip("top_bottom")), pixels[::-1])


def test_any_angle_turns_about_the_middle() -> None:
    rng = np.random.default_rng(0)
    for _ in range(TRIALS // 5):
        width, height = (int(side) for side in rng.integers(40, 120, 2))
        # cubic interpolation is exact for a linear gradient; blue is 0 inside the image and 255 outside
        pixels = coded(width, height)
        degrees = float(rng.uniform(0, 360))
        turned = seen(tools(pixels).rotate(degrees)).astype(int)
        corner = complex(width, height) / 2
        spin = np.exp(1j * np.radians(degrees))  # y points down: clockwise
        corners = [spin * (sign * corner.real + other * corner.imag * 1j) for sign in (1, -1) for other in (1, -1)]
        assert turned.shape[1] == pytest.approx(max(c.real for c in corners) * 2, abs=1)
        assert turned.shape[0] == pytest.approx(max(c.imag for c in corners) * 2, abs=1)
        y, x = np.indices(turned.shape[:2]) + 0.5
        before = (x - turned.shape[1] / 2 + 1j * (y - turned.shape[0] / 2)) / spin + corner
        inside = (abs(before.real - width / 2) < width / 2 - 3) & (abs(before.imag - height / 2) < height / 2 - 3)
        outside = (abs(before.real - width / 2) > width / 2 + 3) | (abs(before.imag - height / 2) > height / 2 + 3)
        assert abs(turned[..., 0] - (before.real - 0.5))[inside].max() <= 1
        assert abs(turned[..., 1] - (before.imag - 0.5))[inside].max() <= 1
        assert (turned[outside] == 255).all()


@pytest.mark.parametrize("coordinates", list(Coordinates))
def test_boxes_are_drawn_along_their_edges(coordinates: str) -> None:
    for rng, pixels, size in images(TRIALS // 5):
        corners = [np.sort(rng.choice(side + 1, 2, replace=False)) for side in size]
        left, top, right, bottom = (int(corners[axis][end]) for end in (0, 1) for axis in (0, 1))
        tool = tools(pixels // 2, coordinates)  # without pure red
        result = tool.draw_boxes([stated([left, top, right, bottom], coordinates, size)])
        wide = max(2, round(min(size) / 150))
        expected = (pixels // 2).copy()
        frame = np.zeros(size[::-1], dtype=bool)
        frame[top:bottom, left:right] = True
        frame[top + wide : bottom - wide, left + wide : right - wide] = False
        expected[frame] = (255, 0, 0)
        if min(right - left, bottom - top) > 2 * wide:
            assert np.array_equal(np.asarray(tool._pictures[1].pixels()), expected)
            assert np.array_equal(seen(result), shown(expected))


@pytest.mark.parametrize("coordinates", list(Coordinates))
def test_points_are_marked_where_they_are(coordinates: str) -> None:
    for rng, pixels, size in images(TRIALS // 5):
        x, y = (int(rng.integers(0, side + 1)) for side in size)
        tool = tools(pixels // 2, coordinates)
        tool.draw_points([stated([x, y], coordinates, size)], color="blue")
        drawn = np.asarray(tool._pictures[1].pixels())
        changed = (drawn == (0, 0, 255)).all(-1)
        radius = 2 * max(2, round(min(size) / 150))
        rows, columns = np.indices(changed.shape)
        distance = np.hypot(columns - x, rows - y)
        assert changed[distance < radius - 1].all()
        assert not changed[distance > radius + 1.5].any()
        assert np.array_equal(drawn[~changed], (pixels // 2)[~changed])


def test_the_model_is_told_in_its_own_coordinates() -> None:
    tool = tools(np.zeros((100, 200, 3), dtype=np.uint8), "relative1000")
    assert told(tool.zoom([500, 500, 2000, 1000])) == (
        "The box reached out of the image, and was cut to it. It is [500, 500, 1000, 1000] now. Image 1:"
    )
    assert told(tool.zoom([0, 0, 600, 600], 1)) == "Image 2:"
    assert told(tool.draw_boxes([[0, 0, 1000, 1000], [-900, 0, 250, 500]])) == (
        "Box 1 reached out of the image, and was cut to it. It is [0, 0, 250, 500] now. Image 3:"
    )


def test_mistakes_are_told() -> None:
    tool = tools(np.zeros((100, 200, 3), dtype=np.uint8), "relative1000")
    for call, message in (
        (lambda: tool.zoom([0, 0, 10, 10], 1), r"img_idx: got 1; there are the images 0 to 0"),
        (lambda: tool.zoom([500, 0, 400, 10]), "left has to be less than right"),
        (lambda: tool.zoom([1001, 0, 1200, 10]), "nothing of the image"),
        (lambda: tool.draw_boxes([[0, 0, 9, 9], [9, 9, 9, 9]]), r"boxes\.1"),
        (lambda: tool.measure([0, 0], [1001, 1100]), r"end: got \[1001, 1100\], outside of the image"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    tool.release()
    with pytest.raises(ValueError, match="there are no images"):
        tool.zoom([0, 0, 50, 50])
