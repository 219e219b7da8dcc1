"""The zoom recipe: its images and reward."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.images.families import load_vision
from tests.conftest import REPOSITORY
from tests.recipes.chains import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.extended]

RECIPE = REPOSITORY / "recipes" / "zoom"
Picture, PATTERNS, named = (load_object(f"pictures.py:{name}", RECIPE) for name in ("Picture", "PATTERNS", "named"))
prepare, HELD_OUT, ASKED, GIVE_UP = (
    load_object(f"prepare.py:{name}", RECIPE) for name in ("prepare", "HELD_OUT", "ASKED", "GIVE_UP")
)


def test_the_whole_picture_is_seen_the_same_with_any_pattern(prepared: Path) -> None:
    vision = load_vision(str(prepared / "model"))
    rng = random.Random(1)
    for _ in range(20):
        picture = Picture.draw(rng)
        painted = [replace(picture, patterns={**picture.patterns, ASKED: name}).paint() for name in PATTERNS]
        assert len({image.tobytes() for image in painted}) == len(PATTERNS)
        assert len({vision.fit(image).tobytes() for image in painted}) == 1


def test_no_picture_is_trained_and_held_out(prepared: Path) -> None:
    heldout, train = (
        {(prepared / image).read_bytes() for row in read_rows(prepared / name) for image in row["images"]}
        for name in ("heldout.jsonl", "train.jsonl")
    )
    assert len(heldout) == HELD_OUT
    assert not heldout & train


@pytest.mark.parametrize(
    ("prediction", "reward"),
    [("dots", 1.0), (" dots\n", 1.0), ("mesh", -0.5), ("dots or mesh", 0.0), (GIVE_UP, 0.0), (None, 0.0)],
)
def test_the_pattern_of_the_box_pays_and_a_guess_does_not(prediction: str | None, reward: float) -> None:
    assert named(prediction=prediction, answer="dots") == {"reward": reward, "success": float(reward == 1)}
