"""Tests of the world, without a model: run `python -m pytest test_my_task.py` in this folder."""

import json
from pathlib import Path

from my_task import Aquarium

from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe

HERE = Path(__file__).parent


def test_the_water_gets_right() -> None:
    aquarium = Aquarium()
    assert aquarium.reset(wanted=70, degrees=69, dirt=1) == "The water is dirty."
    assert aquarium.tend("clean") == "The water is too cold: 69 degrees."
    # `finish(...)` ends the chain; its text is what the agent reads
    assert aquarium.tend("heat").value == "The water is right."
    assert aquarium.reward() == {"reward": 1, "success": 1, "hours_left": 2}


def test_the_day_ends() -> None:
    aquarium = Aquarium()
    aquarium.reset(wanted=70, degrees=71, dirt=0)
    assert aquarium.tend("heat") == "The water is too warm: 72 degrees."
    aquarium.tend("clean")
    assert aquarium.tend("cool").value == "The water is too warm: 71 degrees."
    assert aquarium.reward()["success"] == 0


def test_nothing_is_left_of_the_last_task() -> None:
    aquarium = Aquarium()
    aquarium.reset(wanted=70, degrees=69, dirt=0)
    aquarium.tend("heat")
    aquarium.reset(wanted=80, degrees=79, dirt=2)
    assert (aquarium.anchor(), aquarium.hours, aquarium.reward()["success"]) == ((79, 2), 5, 0)


def test_every_water_can_be_made_right() -> None:
    for file in ("tasks.jsonl", "heldout.jsonl"):
        for row in map(json.loads, (HERE / file).read_text(encoding="utf-8").splitlines()):
            aquarium = Aquarium()
            aquarium.reset(**row)
            needed = ["clean"] * row["dirt"] + ["heat"] * (row["wanted"] - row["degrees"])
            for action in needed + ["cool"] * (row["degrees"] - row["wanted"]):
                aquarium.tend(action)
            assert aquarium.reward() == {"reward": 1, "success": 1, "hours_left": 2}, row


def test_the_recipes_are_sound() -> None:
    # `lacks` allows packages that only the training machine needs, such as vLLM
    check_recipe(load_recipe(HERE / "recipe.yaml"), lacks=[])
    check_recipe(load_recipe(HERE / "tiny" / "recipe.yaml"), lacks=[])
