"""Textarena's games: each to its end by legal and by illegal moves, without a network; opponents; chains."""

import itertools
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.textarena.games import MOVES, SINGLE, family, players
from agentfactory.worlds.textarena.tasks import TextArenaSource

pytestmark = [pytest.mark.processes, pytest.mark.extended]

Play: Any = pytest.importorskip("agentfactory.worlds.textarena.play", exc_type=ImportError).Play

WAYS = ("[up]", "[down]", "[left]", "[right]")
NUMBERS = [str(number) for number in range(15)]


def listed(*parts: Any) -> list[str]:
    return [f"[{' '.join(each)}]" for each in itertools.product(*parts)]


LEGAL = {
    **dict.fromkeys(("2048", "FifteenPuzzle", "FrozenLake", "Sokoban"), WAYS),
    "Bandit": ("[red]", "[blue]", "[green]"),
    "Blackjack": ("[Hit]", "[Stand]"),
    "GuessTheNumber": listed([str(number) for number in range(1, 51)]),
    "LightsOut": listed(NUMBERS[:5], NUMBERS[:5]),
    "Mastermind": [f"[{' '.join(p)}]" for n in (4, 6) for p in itertools.permutations("123456", n)],
    "Minesweeper": listed(NUMBERS[:12], NUMBERS[:12]),
    "PegJump": listed([*NUMBERS[1:], "15"], [*NUMBERS[1:], "15"]),
    "RushHour": [f"[{car}{way}]" for car in "ABCDEFGHIJKLMNOPX" for way in "+-"],
    "Secretary": ("[continue]", "[accept]"),
    "Sudoku": listed("123456789", "123456789", "123456789"),
    "TowerOfHanoi": listed("ABC", "ABC"),
}
"""Games for one player -> moves of which some are legal at any time."""
QUICK = (
    *("2048-v0-mega-easy", "Bandit-v0", "Blackjack-v0", "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0"),
    *("Mastermind-v0", "PegJump-v0", "Secretary-v0", "Sudoku-v0-easy", "TicTacToe-v0", "WildTicTacToe-v0"),
    *("UltimateTicTacToe-v0", "ConnectFour-v0", "Nim-v0", "Othello-v0-tiny", "KuhnPoker-v0", "PigDice-v0-50"),
    *("IteratedRockPaperScissors-v0", "IteratedMatchingPennies-v0", "Chopsticks-v0", "LiarsDice-v0-small"),
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a game used the network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)


def check_to_the_end(game: str) -> None:
    play, rng = Play(), random.Random(1)
    shown = play.reset(game, {}, "random", "both", 3)
    assert shown["text"]
    for _ in range(1500):
        if shown["done"]:
            break
        moves = list(MOVES.get(family(game)) or LEGAL[family(game)])
        move = play.legal_move(rng.sample(moves, len(moves)))
        if move is None:  # no jump, no way: such a position is left by an illegal move
            break
        shown = play.act(move)
        assert not shown["illegal"], move
    assert isinstance(play.resign(), float)
    assert play._state.done

    shown = play.reset(game, {}, "random", "both", 3)
    first = play.act("[zzz]")
    assert first["illegal"]
    assert not first["done"]
    second = play.act("[zzz]")
    assert second["done"]
    assert second["reward"] == (-1 if players(game) == 2 else pytest.approx(second["reward"]))


def test_every_kind_of_game_is_played() -> None:
    slow = {"FifteenPuzzle", "Minesweeper", "RushHour", "Sokoban", "TowerOfHanoi"}
    assert {family(game) for game in QUICK} | slow == {*SINGLE, *MOVES}


@pytest.mark.parametrize("game", QUICK)
def test_a_game_ends_by_legal_and_by_illegal_moves(game: str) -> None:
    check_to_the_end(game)


@pytest.mark.long
@pytest.mark.parametrize("game", sorted({*Play().names()} - {*QUICK}))
def test_every_other_version_does_too(game: str) -> None:
    check_to_the_end(game)


def test_a_seed_is_a_game() -> None:
    def begun(game: str, seed: int) -> Any:
        return Play().reset(game, {}, "random", "both", seed)["text"]

    for game in ("Sudoku-v0-easy", "KuhnPoker-v0", "TicTacToe-v0"):
        assert begun(game, 5) == begun(game, 5)
    assert begun("Sudoku-v0-easy", 5) != begun("Sudoku-v0-easy", 6)
    # in odd tasks the opponent begins
    assert "You are Player 0" in begun("TicTacToe-v0", 4)
    assert "You are Player 1" in begun("TicTacToe-v0", 5)
    play = Play()
    assert "You are Player 0" in play.reset("TicTacToe-v0", {}, "first", "first", 5)["text"]
    # the opponent's first legal move takes 0
    assert "'[0]'" not in play.act("8")["text"].splitlines()[-1]


async def test_chains_play_and_are_judged() -> None:
    tasks = TextArenaSource(game="TicTacToe-v0", opponent="first", plays="first", tasks=2).rows()
    recipe = ToolsRecipe(tools=["textarena"])
    async with open_toolset(recipe, Path.cwd()) as toolset:
        toolset.check_rows(tasks, "data", False)
        async with toolset.chain("wins", tasks[0]) as session:
            assert "You are Player 0 in Tic Tac Toe" in str(session.opening)
            for move in ("[4]", "[zzz]", "3"):
                assert not (await session.call(ToolCall("1", "act", {"move": move}))).finish
            last = await session.call(ToolCall("1", "act", {"move": "[5]"}))
            assert last.finish
            assert "The game is over. Your reward: 1." in str(last.content)
            won = await session.reward()
        async with toolset.chain("stops", tasks[1]) as session:
            await session.call(ToolCall("1", "act", {"move": "[4]"}))
            resigned = await session.reward()
    assert (won.reward, won.metrics) == (1, {"success": 1, "moves": 4, "illegal": 1, "finished": 1})
    assert (resigned.reward, resigned.metrics["finished"]) == (-1, 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"game": "TicTacTo-v0"}, "fix: use TicTacToe-v0"),
        ({"game": "Wordle-v0"}, "got 'Wordle-v0', which is not among the games of docs/textarena.md"),
        ({"game": "Bandit-v0", "plays": "first"}, "textarena.plays: got 'first', and Bandit-v0 has one player; fix: "),
        ({"game": "Nim-v0", "options": {"heaps": 3}}, "textarena.options: Nim-v0 refuses {'heaps': 3}"),
    ],
)
def test_a_source_names_the_field(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError) as refused:
        TextArenaSource(**fields).rows()
    assert told in str(refused.value)
