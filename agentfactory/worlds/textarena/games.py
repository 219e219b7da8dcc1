"""The games of textarena 0.7.4 that play without a network, and the moves that a scripted opponent tries in them.

A test plays each to an end, by legal and by illegal moves. Left out: games that download word lists (Hangman, Wordle,
WordLadder, WordSearch, WordChains, SpellingBee, DontSayIt, LetterAuction, Codenames, Taboo), that ask a paid judge
(GuessWho, TwentyQuestions, Debate, ScenarioPlanning), that fail to import or lack files (Klondike, Checkers, Chess,
ReverseTicTacToe, IteratedStagHunt, UltimateTexasHoldem, UsedCarNegotiation, ScorableGames), that return a text in place
of a reward (Countdown, Cryptarithm, Slitherlink, ThreeCardMonte), and that need three players or free conversation.
"""

from collections.abc import Sequence
from itertools import product

SINGLE = (
    *("2048", "Bandit", "Blackjack", "FifteenPuzzle", "FrozenLake", "GuessTheNumber", "LightsOut", "Mastermind"),
    *("Minesweeper", "PegJump", "RushHour", "Secretary", "Sokoban", "Sudoku", "TowerOfHanoi"),
)
SLOW = ("Sokoban-v0-medium", "2048-v0-8x8", "2048-v0-10x10")
"""Versions that take minutes to begin, or thousands of moves to end."""


def _numbers(*ranges: int, first: int = 0, form: str = "[{}]", between: str = " ") -> list[str]:
    cells = product(*(range(first, first + count) for count in ranges))
    return [form.format(between.join(map(str, cell))) for cell in cells]


MOVES: dict[str, Sequence[str]] = {
    "TicTacToe": _numbers(9),
    "WildTicTacToe": [*_numbers(9, form="[X {}]"), *_numbers(9, form="[O {}]")],
    "UltimateTicTacToe": _numbers(9, 9),
    "ConnectFour": _numbers(12, form="[col {}]"),
    "Nim": [f"[{pile} {count}]" for pile in range(5) for count in range(1, 12)],
    "Othello": _numbers(14, 14, between=", "),
    "KuhnPoker": ["[check]", "[bet]", "[call]", "[fold]"],
    "PigDice": ["[roll]", "[hold]"],
    "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
    "IteratedMatchingPennies": ["[heads]", "[tails]"],
    "Chopsticks": [*_numbers(2, 2, form="[attack {}]"), *_numbers(9, 9, form="[split {}]")],
    "LiarsDice": ["[Call]", *(f"[Bid: {count}, {face}]" for count in range(1, 31) for face in range(1, 7))],
}
"""Games for two players -> every move that is legal at some time."""


def family(name: str) -> str:
    """Return a game's name without its version: TicTacToe of TicTacToe-v0."""
    return name.partition("-v")[0]


def players(name: str) -> int | None:
    """Return the number of players of a game; None if it is not one of ours."""
    if name in SLOW or name.endswith(("-raw", "-train")):
        return None
    return 1 if family(name) in SINGLE else 2 if family(name) in MOVES else None
