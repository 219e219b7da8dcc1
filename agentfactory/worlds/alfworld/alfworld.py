"""`AlfWorld`: an environment with text-based household tasks."""

import os
from collections.abc import Iterator
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.alfworld.engine import Engine, GameError, Play, Scene, found_python
from agentfactory.worlds.alfworld.games import Games, GeneratedGames, PublishedGames, Split
from agentfactory.worlds.alfworld.generator import TaskType
from agentfactory.worlds.shared import Shared

QUESTION = "Do the task that is described below: take one action per turn, until it is done."
"""The `question` of a data row, followed in the prompt by the room and the task."""

_engines: Shared[Engine] = Shared()


class AlfWorld(Environment):
    """ALFWorld (Shridhar et al., 2021): the reward is 1 if the task is done within `max_steps` actions, else 0.

    The data row's `game` names a game; `alfworld_tasks` makes such rows. Games run in subprocesses shared by all
    instances.

    Args:
        data: folder of ALFWorld's games, such as $ALFWORLD_DATA; null: our own games, generated from a seed.
        seed: seed of our own games.
        show_actions: whether each observation ends with a line of the admissible actions.
        max_steps: actions after which the chain ends.
        processes: number of subprocesses; null: one per processor.
        games_per_process: games after which a subprocess is replaced, because its memory grows with each.
        python: the Python that has the package `alfworld`, relative to the working directory; null: this one.

    Raises:
        SettingError: an option is out of range, the folder does not exist, or a package is missing.
    """

    def __init__(
        self,
        data: str | None = None,
        seed: int = 0,
        show_actions: bool = False,
        max_steps: int = 50,
        processes: int | None = None,
        games_per_process: int = 200,
        python: str | None = None,
    ) -> None:
        count = (os.cpu_count() or 1) if processes is None else processes
        for name, value in (("max_steps", max_steps), ("processes", count), ("games_per_process", games_per_process)):
            if type(value) is not int or value < 1:
                raise SettingError(name, f"got {value!r}", "give a whole number from 1")
        published = None if data is None else PublishedGames(data)
        self._show_actions, self._max_steps = show_actions, max_steps
        self._play: Play | None = None
        self._scene: Scene | None = None
        self._steps, self._won, self._type = 0, False, ""
        self._key = (count, games_per_process, python)
        self._engine = _engines.acquire(self._key, lambda: Engine(count, games_per_process, found_python(python)))
        try:
            self._games: Games = published or GeneratedGames(seed, self._engine.package())
        except BaseException:
            self.close()
            raise

    def reset(self, game: str, task_type: str = "", **task: Any) -> str:
        """Begin the game of this name. Raises ValueError if it does not exist or cannot be loaded."""
        self.release()
        content = self._games.content(game)
        try:
            self._play, scene = self._engine.open(content)
        except GameError as error:
            raise ValueError(f"game: got {game!r}, which cannot be loaded: {error}") from error
        self._type = task_type
        self._scene = scene
        return self._shown(scene)

    @tool
    def action(self, command: str) -> Any:
        """Take an action in the room, and see what happens.

        Args:
            command: Such as go to fridge 1, open drawer 2, take apple 1 from countertop 1, move apple 1 to fridge 1,
                heat apple 1 with microwave 1, use desklamp 1, look, inventory or help.
        """
        assert self._play is not None, "reset() begins a game"
        scene = self._scene = self._play.act(command)
        self._steps += 1
        self._won = scene.won
        if scene.won or self._steps >= self._max_steps:
            return finish(scene.observation)
        return self._shown(scene)

    def reward(self) -> dict[str, float]:
        """Return `reward` and `success` (both 1 if the task is done), `steps`, and success under the task type."""
        by_type = {self._type: float(self._won)} if self._type else {}
        return {"reward": float(self._won), "success": float(self._won), "steps": float(self._steps), **by_type}

    def anchor(self) -> list[Any] | None:
        """Return the last observation and the admissible actions; None once the task is done."""
        scene = self._scene
        return None if scene is None or scene.won else [scene.observation, scene.admissible]

    def release(self) -> None:
        if self._play is not None:
            self._play.close()
        self._play = self._scene = None
        self._steps, self._won, self._type = 0, False, ""

    def gauges(self) -> dict[str, float]:
        return {"started": float(self._engine.started)}

    def close(self) -> None:
        self.release()
        engine = _engines.release(self._key)
        if engine is not None:
            engine.close()

    def _shown(self, scene: Scene) -> str:
        if not self._show_actions:
            return scene.observation
        return f"{scene.observation}\nAdmissible actions: {', '.join(scene.admissible)}"


def alfworld_tasks(
    split: str,
    data: str | None = None,
    types: list[str] | None = None,
    python: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Return the data rows of a split: `question`, `game` (its name) and `task_type`. `types` selects task types by
    name; null: all six. `data` and `python` must equal the environment's options.

    Raises SettingError if a split or type is unknown, if there are no such games, or if the packages are missing.
    """
    if split not in tuple(Split):
        raise SettingError("split", f"got {split!r}", f"use one of {', '.join(Split)}")
    wanted = list(TaskType) if types is None else types
    if unknown := [name for name in wanted if name not in tuple(TaskType)]:
        raise SettingError("types", f"got {unknown[0]!r}", f"use some of {', '.join(TaskType)}")
    found_python(python)
    games: Games = GeneratedGames(0) if data is None else PublishedGames(data)
    rows = [
        {"question": QUESTION, "game": name, "task_type": task_type.value}
        for name, task_type in games.names(Split(split), [TaskType(name) for name in wanted])
    ]
    if not rows:
        raise SettingError("types", f"{split} has no games of {', '.join(wanted)}", "use another split, or more types")
    return iter(rows)
