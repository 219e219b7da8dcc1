"""Games by split and name: from a folder in the published layout, or generated from a seed."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.row_files import is_inside
from agentfactory.worlds.alfworld.engine import expanded_path
from agentfactory.worlds.alfworld.generator import Game, Package, TaskType, make_game

FOLDER = "json_2.1.1"
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
_GET = "run alfworld-download, which fetches the games into $ALFWORLD_DATA (default: ~/.cache/alfworld)"


class Split(StrEnum):
    """The published splits. `valid_unseen` uses rooms that never occur in training."""

    TRAIN = "train"
    VALID_SEEN = "valid_seen"
    VALID_UNSEEN = "valid_unseen"


COUNTS = {Split.TRAIN: 3000, Split.VALID_SEEN: 150, Split.VALID_UNSEEN: 150}
"""Number of generated games per split, close to the published 3,553, 140 and 134."""


class Games(Protocol):
    """A source of games."""

    def names(self, split: Split, types: list[TaskType]) -> Iterator[tuple[str, TaskType]]:
        """Yield the name and type of each game of a split, in a fixed order."""
        ...

    def content(self, name: str) -> Path | dict[str, Any]:
        """Return a game's file, or its content. Raises ValueError if there is no such game."""
        ...


class PublishedGames:
    """The games of a folder, named by their paths in it. The folder is ALFWORLD_DATA, its subfolder json_2.1.1, or the
    output of `write_games`. Like the published loader, it skips games that are not known to be solvable, and tasks with
    movable receptacles or sliced objects. Raises SettingError if the folder does not exist."""

    def __init__(self, data: str) -> None:
        given = expanded_path("data", data).resolve()
        self._root = given / FOLDER if (given / FOLDER).is_dir() else given
        if not any((self._root / split).is_dir() for split in Split):
            raise SettingError("data", f"{data}: there is no folder {given / FOLDER} with games", _GET)

    def names(self, split: Split, types: list[TaskType]) -> Iterator[tuple[str, TaskType]]:
        for trajectory in sorted((self._root / split).rglob(TRAJECTORY)):
            name, game = str(trajectory.parent.relative_to(self._root)), trajectory.with_name(GAME)
            if "movable" in name or "Sliced" in name or not game.exists():
                continue
            task_type = json.loads(trajectory.read_bytes())["task_type"]
            if task_type in types and json.loads(game.read_bytes()).get("solvable"):
                yield name, TaskType(task_type)

    def content(self, name: str) -> Path:
        file = self._root / str(name) / GAME
        if not is_inside(str(name)) or not file.is_file():
            raise ValueError(f"game: got {name!r}, and there is no file {file} in the folder of games")
        return file


class GeneratedGames:
    """Games generated on demand by `make_game`, named train/000000 and so on, with alternating types. `package` has the
    tables for generation; listing names does not need it."""

    def __init__(self, seed: int, package: Package | None = None) -> None:
        self._seed, self._package = seed, package

    def names(self, split: Split, types: list[TaskType]) -> Iterator[tuple[str, TaskType]]:
        for number in range(COUNTS[split]):
            if _type_of(number) in types:
                yield f"{split}/{number:06d}", _type_of(number)

    def content(self, name: str) -> dict[str, Any]:
        return self.game(name).content

    def game(self, name: str) -> Game:
        """Generate a game. Raises ValueError if the name is invalid."""
        assert self._package is not None
        split, _, number = name.partition("/") if isinstance(name, str) else ("", "", "")
        if split not in tuple(Split) or not number.isdecimal():
            raise ValueError(f"game: got {name!r}; generated games are called train/000000 and so on")
        plans = self._package.unseen if split == Split.VALID_UNSEEN else self._package.seen
        return make_game(self._package, _type_of(int(number)), plans, f"{self._seed}/{split}/{int(number):06d}")


def _type_of(number: int) -> TaskType:
    types = list(TaskType)
    return types[number % len(types)]
