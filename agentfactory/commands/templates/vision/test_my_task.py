"""Tests of the task, without a model: run `python -m pytest test_my_task.py` in this folder."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from make_pictures import CLOTHS, CORNERS, draw
from my_task import Pictures, right_cloth

from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe

HERE = Path(__file__).parent


def rows() -> list[dict]:
    """Return all tasks."""
    files = [(HERE / file).read_text(encoding="utf-8") for file in ("tasks.jsonl", "heldout.jsonl")]
    return [json.loads(line) for text in files for line in text.splitlines()]


def test_a_corner_is_seen_from_near() -> None:
    row = rows()[0]
    pictures = Pictures()
    pictures.reset([HERE / image for image in row["images"]])
    corners = [np.asarray(pictures.look(corner)) for corner in CORNERS]
    assert [corner.shape for corner in corners] == [(128, 128, 3)] * 4
    # each is another piece of cloth
    assert not any(np.array_equal(corners[0], corner) for corner in corners[1:])


@pytest.mark.parametrize("cloth", CLOTHS)
def test_no_two_cloths_look_alike(cloth: str) -> None:
    drawn = {other: np.asarray(draw(other, random.Random(0))) for other in CLOTHS}
    same = [other for other in CLOTHS if np.array_equal(drawn[other], drawn[cloth])]
    assert same == [cloth]


@pytest.mark.parametrize(
    ("said", "reward"),
    [("stripes", 1), ("It is Stripes.", 1), ("bands", 0), ("bands or stripes", 0), ("", 0), (None, 0)],
)
def test_the_right_name_alone_is_rewarded(said: str | None, reward: float) -> None:
    assert right_cloth(said, "stripes")["reward"] == reward


def test_the_pictures_are_there() -> None:
    for row in rows():
        assert all((HERE / image).is_file() for image in row["images"]), row


def test_the_recipes_are_sound() -> None:
    # `lacks` allows packages that only the training machine needs, such as vLLM
    check_recipe(load_recipe(HERE / "recipe.yaml"), lacks=[])
    check_recipe(load_recipe(HERE / "tiny" / "recipe.yaml"), lacks=[])
