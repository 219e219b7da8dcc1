"""The small TicTacToe: its transcripts are games as the world shows them, of which few are won."""

import random

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.tasks import TextArenaSource
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "textarena"
play, board = (load_object(f"prepare.py:{name}", FOLDER) for name in ("play", "board"))


@pytest.mark.processes
@pytest.mark.extended
def test_transcripts_are_games_of_which_few_are_won() -> None:
    pytest.importorskip("textarena")
    game, rng = TextArena(), random.Random(0)
    won = illegal = moves = 0.0
    try:
        for row in TextArenaSource(game="TicTacToe-v0", plays="first", tasks=100).rows():
            messages = play(game, row, rng)
            verdict = game.reward()
            assert verdict["finished"] == 1.0
            assert messages[-1]["role"] == "assistant"
            won += verdict["success"]
            illegal += verdict["illegal"]
            moves += verdict["moves"]
    finally:
        game.close()
    assert won < 45
    assert 0.1 < illegal / moves < 0.5


def test_the_last_board_is_read() -> None:
    line = "\n---+---+---\n"
    boards = [
        line.join(rows) for rows in ([" 0 | 1 | 2 ", " 3 | O | 5 ", " 6 | 7 | 8 "], [" O | 1 | 2 ", " 3 | O | 5 "])
    ]
    assert board("\n".join([*boards]) + line + " X | 7 | 8 ") == ["O", "1", "2", "3", "O", "5", "X", "7", "8"]
