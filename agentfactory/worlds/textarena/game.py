"""`TextArena`: an environment that plays textarena's games."""

from typing import Any

from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.game_processes.game_world import GameWorld


class TextArena(GameWorld):
    """A game of textarena, alone or against a scripted opponent: the reward is the game's.

    A data row has `game`, `options`, `opponent`, `plays` and `seed`; `data.textarena` makes such rows.
    """

    package = "textarena"
    place = "agentfactory.worlds.textarena.play:Play"
    _verdict: float | None

    def reset(self, game: str, options: dict[str, Any], opponent: str, plays: str, seed: int, **task: Any) -> str:
        """Begin a game; return its rules and the first position. Raises SettingError (an option is invalid),
        ToolInfrastructureError (the game failed, or took too long)."""
        return str(self._begin(game, options, opponent, plays, seed)["text"])

    @tool
    def act(self, move: str) -> Any:
        """Make a move. Returns what happens until it is your turn again.

        Args:
            move: The move in the form that the game's rules ask for, such as [4].
        """
        if self._verdict is not None:
            raise ValueError("the game is over")
        shown = self._process.call("act", move.encode("utf-8", "replace").decode())
        self._moves += 1
        self._illegal += shown["illegal"]
        self._anchor = None if shown["done"] else shown["anchor"]
        info = {"illegal": shown["illegal"]}
        if not shown["done"]:
            return {"observation": shown["text"], **info}
        self._verdict = shown["reward"]
        over = f"The game is over. Your reward: {self._verdict:g}."
        return finish({"observation": "\n".join(filter(None, (shown["text"], over))), **info})

    def reward(self) -> dict[str, float]:
        """Return `reward` (the game's; a chain that stops early resigns, by illegal moves), `success` (1.0 if it is at
        least 1), `moves`, and how many of them were `illegal`."""
        reward = self._process.call("resign") if self._verdict is None else self._verdict
        numbers = {"moves": self._moves, "illegal": self._illegal, "finished": self._verdict is not None}
        return {"reward": reward, "success": float(reward >= 1), **{name: float(n) for name, n in numbers.items()}}

    def release(self) -> None:
        super().release()
        self._moves = self._illegal = 0
        self._verdict = None
