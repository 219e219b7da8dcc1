"""Tests of the world, without a model: run `python -m pytest test_my_task.py` in this folder."""

import json
from pathlib import Path

from my_task import Lift

from agentfactory.recipe.load import load_recipe

HERE = Path(__file__).parent


def test_the_way_to_the_parcel() -> None:
    lift = Lift()
    assert lift.reset(start=3, parcel=5) == "Floor 3. The parcel is above you."
    assert lift.ride("up") == "Floor 4. The parcel is above you."
    # `finish(...)` ends the chain; its text is what the agent reads
    assert lift.ride("up").value == "The doors open at the parcel."
    assert lift.reward() == {"reward": 1, "success": 1, "power_left": 2}


def test_the_power_ends() -> None:
    lift = Lift()
    lift.reset(start=1, parcel=2)
    assert lift.ride("down") == "Floor 1. The parcel is above you."
    lift.ride("down")
    assert lift.ride("down").value == "The power is used up."
    assert lift.reward()["success"] == 0


def test_nothing_is_left_of_the_last_task() -> None:
    lift = Lift()
    lift.reset(start=3, parcel=4)
    lift.ride("up")
    lift.reset(start=9, parcel=7)
    assert (lift.anchor(), lift.power, lift.reward()["success"]) == (9, 4, 0)


def test_every_parcel_can_be_reached() -> None:
    for file in ("tasks.jsonl", "heldout.jsonl"):
        for row in map(json.loads, (HERE / file).read_text(encoding="utf-8").splitlines()):
            lift = Lift()
            lift.reset(**row)
            while lift.here != row["parcel"]:
                lift.ride("up" if row["parcel"] > lift.here else "down")
            assert lift.reward() == {"reward": 1, "success": 1, "power_left": 2}, row


def test_the_recipes_are_sound() -> None:
    # `lacks` allows packages that only the training machine needs, such as vLLM
    load_recipe(HERE / "recipe.yaml", lacks=[])
    load_recipe(HERE / "tiny" / "recipe.yaml", lacks=[])
