"""The small Nim: the rule by which its transcripts are played, and that they are games as the world shows them."""

import random
from functools import cache
from itertools import product

import pytest

from agentfactory.tools.user_code.loading import load_object
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.tasks import TextArenaSource
from tests.conftest import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "textarena"
play, read_piles, legal_moves, after, loses_by_other_rule = (
    load_object(f"prepare.py:{name}", RECIPE)
    for name in ("play", "read_piles", "legal_moves", "after", "loses_by_other_rule")
)


@cache
def loses_to_move(piles: tuple[int, ...]) -> bool:
    """Search all games in which the last object loses."""
    return any(piles) and all(not loses_to_move(tuple(after(piles, move))) for move in legal_moves(piles))


def test_the_other_rule_is_the_one_where_the_last_object_loses() -> None:
    for piles in product(range(4), range(6), range(8)):
        assert loses_by_other_rule(piles) is loses_to_move(piles), piles


@pytest.mark.processes
@pytest.mark.extended
def test_transcripts_are_legal_games_of_which_few_are_won() -> None:
    pytest.importorskip("textarena")
    game, rng = TextArena(), random.Random(0)
    rows = TextArenaSource(game="Nim-v0", options={"piles": [3, 5, 7]}, tasks=100).rows()
    won = 0.0
    try:
        for row in rows:
            messages = play(game, row, rng)
            calls, seen = messages[2::2], [message["content"] for message in messages[1::2]]
            assert len(calls) == len(seen)
            for call, shown in zip(calls, seen, strict=True):
                pile, count = call["tool_calls"][0]["function"]["arguments"]["move"].strip("[]").split()
                assert (int(pile), int(count)) in legal_moves(read_piles(shown, 3))
            verdict = game.reward()
            assert verdict["finished"] == 1.0
            assert verdict["illegal"] == 0.0
            won += verdict["success"]
    finally:
        game.close()
    assert won < 30
