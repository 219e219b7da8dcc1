"""`data.textarena`: games of textarena, as data rows."""

import difflib
from typing import Any, Literal

from pydantic import Field

from agentfactory.base.config import Options, PositiveInt
from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import TaskSource
from agentfactory.worlds.textarena.game import TextArena
from agentfactory.worlds.textarena.games import players

QUESTION = "Play the game that is described below, and win it. Make one move per turn."


class TextArenaSource(TaskSource):
    """Games of textarena (docs/textarena.md)."""

    world = "textarena"

    game: str
    """Registered name, such as TicTacToe-v0 or GuessTheNumber-v0."""
    options: Options = {}
    """Arguments of textarena.make for it, such as {max_turns: 20}."""
    tasks: PositiveInt = 1000
    """Number of tasks, with the seeds from first_seed on."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first task. Ranges of training and evaluation must not overlap."""
    opponent: Literal["random", "first"] = "random"
    """In games for two: an opponent that makes random legal moves, drawn by the task's seed, or always the first legal
    move in a fixed order."""
    plays: Literal["first", "second", "both"] = "both"
    """In games for two: the agent is player 0 (first), player 1 (second), or player 1 if the seed is odd (both)."""
    question: str = QUESTION
    """The task in words; the game's own rules follow it."""

    def rows(self) -> list[dict[str, Any]]:
        row = self.model_dump(mode="json", include={"question", "game", "options", "opponent", "plays"})
        with TextArena.checks("textarena", "game", self.game) as process:
            names = process.call("names")
            if self.game not in names:
                near = difflib.get_close_matches(self.game, names, 3, cutoff=0.6) or ["one of them"]
                problem = f"got {self.game!r}, which is not among the games of docs/textarena.md"
                raise SettingError("textarena.game", problem, f"use {' or '.join(near)}")
            idle = {"opponent", "plays"} & self.model_fields_set if players(self.game) == 1 else ()
            for name in sorted(idle):
                problem = f"got {getattr(self, name)!r}, and {self.game} has one player"
                raise SettingError(f"textarena.{name}", problem, "remove it")
            process.call("reset", self.game, self.options, self.opponent, self.plays, self.first_seed)
        return [{**row, "seed": seed} for seed in range(self.first_seed, self.first_seed + self.tasks)]
