"""Gymnasium's side: actions, observations and documentation in words; settings that are refused."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from agentfactory.worlds.game_processes.refused import Refused
from agentfactory.worlds.gymnasium.episode import Episode
from agentfactory.worlds.gymnasium.spaces import action_reader


def settings(name: str, **others: Any) -> dict[str, Any]:
    given = {"options": {}, "random_map": None, "render_mode": None, "actions": [], "max_steps": None}
    return {"id": name, **given, **others}


@pytest.mark.parametrize(
    ("space", "names", "given", "wanted"),
    [
        (spaces.Discrete(3), [], 2, 2),
        (spaces.Discrete(3, start=-1), [], "-1", -1),
        (spaces.Discrete(2), ["Left", "Right"], "right", 1),
        (spaces.Discrete(2), [], 1.0, 1),
        (spaces.MultiDiscrete([3, 2]), [], "[2, 1]", [2, 1]),
        (spaces.MultiBinary(2), [], [1, 0], [1, 0]),
        (spaces.Box(-1, 1, (2,)), ["gas", "brake"], [0.5, -1], [0.5, -1.0]),
        (spaces.Text(4), [], "ice", "ice"),
    ],
)
def test_an_action_is_read(space: spaces.Space[Any], names: list[str], given: Any, wanted: Any) -> None:
    action = action_reader(space, names)[1](given)
    assert space.contains(action)
    assert np.asarray(action).tolist() == wanted


@pytest.mark.parametrize(
    ("space", "names", "given", "told"),
    [
        (spaces.Discrete(3), [], 3, "got 3; the actions are the whole numbers from 0 to 2"),
        (spaces.Discrete(2), ["Left", "Right"], "up", "the actions are 0 (Left), 1 (Right)"),
        (spaces.MultiDiscrete([3, 2]), [], [2, 2], "2 whole numbers: from 0 to 2, from 0 to 1"),
        (spaces.MultiDiscrete([3, 2]), [], [0.5, 1], "2 whole numbers"),
        (spaces.Box(-2, 2, (1,)), ["Torque"], 9, "it has to be a number from -2 to 2 (Torque)"),
        (spaces.Box(-2, 2, (1,)), [], "nan", "a number from -2 to 2"),
        (spaces.Text(2), [], "icebergs", "a text of 1 to 2 of the characters"),
    ],
)
def test_an_action_that_is_none_is_refused(space: spaces.Space[Any], names: list[str], given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^action: got ") as refused:
        action_reader(space, names)[1](given)
    assert told in str(refused.value)


def test_frozen_lake_is_text_on_a_map_of_its_seed() -> None:
    lake = settings("FrozenLake-v1", options={"is_slippery": False}, random_map={"size": 4, "p": 0.8})
    episode = Episode()
    begun = episode.reset(lake, 5)
    assert begun["actions"] == "The actions are 0 (Move left), 1 (Move down), 2 (Move right), 3 (Move up)."
    assert begun["text"].startswith("[S]")
    assert episode.reset(lake, 6)["text"] != begun["text"]
    assert episode.reset(lake, 5)["text"] == begun["text"] == Episode().reset(lake, 5)["text"]
    step = episode.act("move down")
    assert step["text"].splitlines()[2].startswith("[")
    back = episode.act("Move up")
    assert back["anchor"] == begun["anchor"] != step["anchor"]


def test_numbers_have_the_names_that_the_documentation_gives_them() -> None:
    begun = Episode().reset(settings("CartPole-v1"), 0)
    assert begun["text"].startswith("Cart Position: ")
    assert "Pole Angular Velocity: " in begun["text"]
    assert begun["actions"] == "The actions are 0 (Push cart to the left), 1 (Push cart to the right)."
    found = Episode().check(settings("Blackjack-v1"), 0)
    assert "The observation consists of a 3-tuple" in found["question"]
    assert found["threshold"] is None
    taxi = Episode().reset(settings("Taxi-v4"), 0)["text"]
    assert "<blue>" in taxi
    assert "\x1b" not in taxi


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        (settings("FrozenLak-v1"), "id", "did you mean FrozenLake-v1"),
        (settings("nowhere:Lake-v0"), "id", "install the package of nowhere"),
        (settings("CartPole-v1", render_mode="ansi"), "render_mode", "CartPole-v1 offers rgb_array"),
        (settings("CartPole-v1", random_map={"size": 4, "p": 1}), "random_map", "only FrozenLake has maps"),
        (settings("FrozenLake-v1", options={"map_name": "9x9"}), "options", "KeyError: '9x9'"),
        (settings("CartPole-v1", actions=["left"]), "actions", "got 1 names"),
    ],
)
def test_settings_that_are_wrong_are_refused(given: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(Refused) as refused:
        Episode().check(given, 0)
    assert refused.value.args[0] == field
    assert told in " ".join(refused.value.args)
    assert len(refused.value.args) == 3
