"""The recipe of a world: its tools and tasks, for a name on the command line."""

import difflib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.entry_points import SOURCES, registered
from agentfactory.commands.worlds.catalogue import sources_of
from agentfactory.recipe.composition import display
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, stages_of
from agentfactory.rollout.config import source_of
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.sessions.toolset import Toolset

_RECIPES = Path(__file__).parents[2] / "recipes"


@dataclass
class Subject:
    """The world or recipe that a command line names. `source` is the name of its registered task source,
    if it has one."""

    name: str
    recipe: Recipe
    source: str | None = None

    def rows(self, first: int | None = None) -> list[Task]:
        """Return its tasks, or the `first` ones; none if it has no data. Raises SettingError if they cannot be made."""
        data = self.recipe.data
        if data is None:
            return []
        if data.sources:
            fix = "name the world of one instead, or a recipe with the rows of one as `data`"
            raise SettingError("data.sources", f"got {len(data.sources)} sources, and one world is played", fix)
        if data.file is not None and not data.file.exists():
            fix = "create it: `agentfactory train` runs the recipe's `prepare` first"
            raise SettingError("data.path", f"there is no {display(data.file)} yet", fix)
        try:
            return load_tasks(data, "data")[:first]
        except SettingError as error:
            raise error.at(source="") from None

    def missing_rows(self, toolset: Toolset, has_rows: bool) -> SettingError | None:
        """Return the error if the world needs rows and has none, else None."""
        if has_rows or not (needed := toolset.needed):
            return None
        row = json.dumps(dict.fromkeys(needed, "..."))
        recipe = next(iter(sorted(_RECIPES.glob(f"{self.name}/*.yaml"))), None)
        fix = f"give a row by --row '{row}'"
        if recipe is not None:
            fix += f", or name a recipe with rows instead of {self.name}, such as recipes/{self.name}/{recipe.name}"
        return SettingError("", f"{self.name} needs tasks with {', '.join(needed)}, and no task source has them", fix)


def open_subject(name: str, overrides: Sequence[str], options: Sequence[str], seconds: float | None = None) -> Subject:
    """Return the world, task source, `FILE.py:NAME` or recipe called `name`.

    Args:
        overrides: `field=value` of its task source, or of the recipe.
        options: `NAME=VALUE`, arguments of the world's constructor.
        seconds: Time limit of the world's start, of its reset, and of a call; None: those of the recipe.

    Raises SettingError if there is none, or a field, an option or this machine does not suit it.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        if options:
            raise SettingError("--option", f"got {options[0]} with a recipe", "set mcp_servers.NAME.options instead")
        recipe = stages_of(load_recipe(name, overrides, "tools"))[-1]
        for config in recipe.mcp_servers.values() if seconds is not None else ():
            config.timeout_seconds = config.pool.create_seconds = float(seconds or 0)
        return Subject(recipe.name, recipe)
    world, source = world_and_source(name, overrides)
    label = world.rpartition(":")[2]
    limits: dict[str, Any] = (
        {} if seconds is None else {"timeout_seconds": seconds, "pool": {"create_seconds": seconds}}
    )
    data: dict[str, Any] = {"name": label, "mcp_servers": {label: {"module": world, **limits}}}
    given = [f"mcp_servers.{label}.options.{option}" for option in options]
    if source is not None:
        data["data"] = {source: {}}
        given += [f"data.{source}.{text}" for text in overrides]
    with tempfile.TemporaryDirectory(prefix="agentfactory-world-") as folder:
        file = Path(folder) / "world.yaml"
        file.write_text(json.dumps(data))
        try:
            recipe = stages_of(load_recipe(file, given, "tools"))[-1]
        except SettingError as error:
            raise _on_command_line(error, source) from None
    return Subject(label, recipe, source)


def world_and_source(name: str, overrides: Sequence[str]) -> tuple[str, str | None]:
    """Return the world and the task source that `name` means."""
    own, known = registered(SOURCES), prebuilt()
    if ":" in name:
        world, sources = name, dict[str, Any]()
        if ".py:" in name:
            path, _, last = name.rpartition(":")
            world = f"{Path(path).resolve()}:{last}"
    elif name in known:
        world, sources = name, sources_of(name)
    elif name in own:
        source = source_of(name)
        if source is not None and source.agent is not None:
            fix = f"train on them by `data: {{{name}: ...}}`, or evaluate a model by `eval.data: {{{name}: ...}}`"
            raise SettingError("", f"the tasks of {name} are played by its own agent, and not by a world here", fix)
        if source is None or source.world is None:
            fix = "name a recipe that has both"
            raise SettingError("", f"the task source {name} names no world that plays its tasks", fix)
        return source.world, name
    else:
        near = difflib.get_close_matches(name, [*known, *own], 1)
        fix = f"did you mean {near[0]}?" if near else "`agentfactory worlds list` shows all; a recipe ends in .yaml"
        raise SettingError("", f"there is no world {name!r}", fix)
    if len(sources) > 1 and name not in sources:
        raise SettingError("", f"{name} has several task sources", f"name one instead: {', '.join(sources)}")
    chosen = name if name in sources else next(iter(sources), None)
    if chosen is None and overrides:
        fix = "give constructor arguments by --option NAME=VALUE, and a row by --row JSON"
        raise SettingError(overrides[0], f"{name} has no task source, so it has no fields", fix)
    return world, chosen


def _on_command_line(error: SettingError, source: str | None) -> SettingError:
    """Return the error for the fields as the command line has them."""
    field = error.field.removeprefix(f"data.{source}.") if source is not None else error.field
    return error.at(field=field, source="")
