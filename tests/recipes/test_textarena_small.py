"""The small GuessTheNumber: its transcripts are games as the world shows them, of which few are won."""

import random

import pytest

from agentfactory.tools.user_code.loading import load_object
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.tasks import TextArenaSource
from tests.conftest import REPOSITORY

play = load_object("prepare.py:play", REPOSITORY / "recipes" / "textarena")


@pytest.mark.processes
@pytest.mark.extended
def test_transcripts_are_games_of_which_few_are_won() -> None:
    pytest.importorskip("textarena")
    game, rng = TextArena(), random.Random(0)
    rows = TextArenaSource(game="GuessTheNumber-v0", options={"max_number": 15, "max_turns": 5}, tasks=100).rows()
    won, against, followed = 0.0, 0, 0
    try:
        for row in rows:
            messages = play(game, row, rng)
            verdict = game.reward()
            assert verdict["finished"] == 1.0
            assert verdict["illegal"] == 0.0
            won += verdict["success"]
            calls = [message["tool_calls"][0]["function"]["arguments"]["move"] for message in messages[2::2]]
            guesses = [int(move.strip("[]")) for move in calls]
            for last, guess, hint in zip(guesses, guesses[1:], messages[3::2], strict=False):
                assert ("is higher" in hint["content"]) != ("is lower" in hint["content"])
                against += (guess < last) == ("is higher" in hint["content"])
                followed += (guess > last) == ("is higher" in hint["content"])
    finally:
        game.close()
    assert won < 35
    assert against > 2 * followed
