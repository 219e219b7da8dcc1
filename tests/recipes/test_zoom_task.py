"""The recipe of zooming: its pictures, transcripts, tool and reward."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentfactory.rollout.images.families import load_vision
from agentfactory.tools.user_code import load_object
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

RECIPE = REPOSITORY / "recipes" / "zoom"
Picture, PATTERNS, COLOURS, named = (
    load_object(f"pictures.py:{name}", RECIPE) for name in ("Picture", "PATTERNS", "COLOURS", "named")
)
Zoom = load_object("zoom.py:Zoom", RECIPE)
prepare, HELD_OUT, LOOKS, ASKED, QUESTION, GIVE_UP = (
    load_object(f"prepare.py:{name}", RECIPE)
    for name in ("prepare", "HELD_OUT", "LOOKS", "ASKED", "QUESTION", "GIVE_UP")
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, 0)
    return folder


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def zoom_of(picture: Image.Image) -> Zoom:
    environment = Zoom()
    environment.reset([picture])
    return environment


def test_the_whole_picture_is_seen_the_same_with_any_pattern(prepared: Path) -> None:
    vision = load_vision(str(prepared / "model"))
    assert vision is not None
    rng = random.Random(1)
    for _ in range(20):
        picture = Picture.draw(rng)
        painted = [replace(picture, patterns={**picture.patterns, ASKED: name}).paint() for name in PATTERNS]
        assert len({image.tobytes() for image in painted}) == len(PATTERNS)
        assert len({vision.fit(image).tobytes() for image in painted}) == 1


def test_each_pattern_is_seen_from_near(prepared: Path) -> None:
    vision = load_vision(str(prepared / "model"))
    assert vision is not None
    picture = Picture.draw(random.Random(2))
    seen = []
    for name in PATTERNS:
        part = zoom_of(replace(picture, patterns={**picture.patterns, ASKED: name}).paint()).zoom(picture.where(ASKED))
        assert vision.fit(part).size == part.size
        seen.append(pixels(part))
    for number, one in enumerate(seen):
        assert all(abs(one - other).mean() > 10 for other in seen[:number])


def test_no_picture_is_trained_and_held_out(prepared: Path) -> None:
    heldout, train = (
        {(prepared / image).read_bytes() for row in rows(prepared / name) for image in row["images"]}
        for name in ("heldout.jsonl", "train.jsonl")
    )
    assert len(heldout) == HELD_OUT
    assert not heldout & train


def test_most_transcripts_give_up_on_a_question_and_zoom_when_told_to(prepared: Path) -> None:
    tasks = {task["images"][0]: task["answer"] for task in rows(prepared / "train.jsonl")}
    told: dict[str, list[tuple[str, bool]]] = {}
    for row in rows(prepared / "transcripts.jsonl"):
        user, first, *rest = row["messages"]
        name, text = user["content"][0]["image_url"]["url"], user["content"][1]["text"]
        told.setdefault(name, []).append((text, bool(rest)))
        if not rest:
            assert first["content"] == GIVE_UP
            continue
        shown, answer = rest
        box = first["tool_calls"][0]["function"]["arguments"]["bbox_2d"]
        [part] = shown["content"]
        with Image.open(prepared / name) as whole, Image.open(prepared / part["image_url"]["url"]) as file:
            assert np.array_equal(pixels(zoom_of(whole).zoom(box)), pixels(file))
            assert min(COLOURS, key=lambda colour: abs(pixels(file).mean((0, 1)) - COLOURS[colour]).sum()) == ASKED
        assert answer["content"] == tasks[name]
    assert told.keys() == tasks.keys()
    assert all(sorted(found) == sorted(LOOKS) for found in told.values())
    asked = [looks for text, looks in LOOKS if text == QUESTION]
    assert sum(asked) < len(asked) / 2


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ([0, 0, 1000, 1000], (400, 200)),
        ([250, 500, 500, 1000], (100, 100)),
        ([-50, -50, 2000, 500], (400, 100)),
        ([500, 500, 501, 501], (32, 32)),
        ([999, 999, 1000, 1000], (32, 32)),
        ([0, 0, 1, 1000], (32, 200)),
    ],
)
def test_a_box_is_cut_to_the_image_and_grows_to_what_can_be_seen(box: list[float], size: tuple[int, int]) -> None:
    assert zoom_of(Image.new("RGB", (400, 200))).zoom(box).size == size


def test_what_is_shown_lies_in_the_box() -> None:
    place = np.indices((200, 400)).sum(0) % 251
    shown = zoom_of(Image.fromarray(place.astype(np.uint8))).zoom([250, 500, 500, 1000])
    assert np.array_equal(pixels(shown)[..., 0], place[100:200, 100:200])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"bbox_2d": [1, 2, 3]}, "bbox_2d: got 3 numbers; give left, top, right, bottom"),
        ({"bbox_2d": [500, 0, 500, 10]}, "left has to be less than right"),
        ({"bbox_2d": [0, 600, 500, 10]}, "top less than bottom"),
        ({"bbox_2d": [1000, 0, 2000, 10]}, "left has to be less than right"),
        ({"bbox_2d": [0, 0, 10, 10], "img_idx": 1}, "img_idx: got 1; there are the images 0 to 0"),
    ],
)
def test_what_is_no_box_is_told(arguments: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        zoom_of(Image.new("RGB", (400, 200))).zoom(**arguments)


def test_a_released_environment_has_forgotten_its_images() -> None:
    environment = zoom_of(Image.new("RGB", (400, 200)))
    environment.release()
    with pytest.raises(ValueError, match="there are no images"):
        environment.zoom([0, 0, 500, 500])


@pytest.mark.parametrize(
    ("prediction", "reward"),
    [("dots", 1.0), (" dots\n", 1.0), ("mesh", -0.5), ("dots or mesh", 0.0), (GIVE_UP, 0.0), (None, 0.0)],
)
def test_the_pattern_of_the_box_pays_and_a_guess_does_not(prediction: str | None, reward: float) -> None:
    assert named(prediction=prediction, answer="dots") == {"reward": reward, "success": float(reward == 1)}


def test_guessing_does_not_pay_on_average() -> None:
    assert sum(named(prediction="dots", answer=name)["reward"] for name in PATTERNS) < 0
