"""The recipe of a world: its tools and tasks, for a name on the command line."""

import difflib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.entry_points import SOURCES, WORLDS, load_named, registered
from agentfactory.base.user_code.extras import check_extra, extras
from agentfactory.base.user_code.watch import announced
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.composition import display
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, stages_of
from agentfactory.rollout.config import TaskSource, source_of
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.tools.environments.environment import Environment, check_machine_for, is_environment
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.sessions.toolset import Toolset


@dataclass
class Entry:
    """An installed world or task source. `needs` are the extras of its package that it needs; `missing` says what is
    not there, and how to install it; `world` is the name of the world that plays a source's tasks."""

    kind: str
    name: str
    place: str
    package: str
    about: str = ""
    needs: list[str] = field(default_factory=list)
    missing: str | None = None
    world: str | None = None

    @property
    def line(self) -> str:
        of = f" (tasks of {self.world})" if self.world and self.world != self.name else ""
        needs = f"; needs {', '.join(self.needs)}" if self.needs else ""
        lack = f"; missing: {self.missing}" if self.missing else ""
        return f"{self.kind:<6} {self.name:<18} {self.about or 'no docstring'}{of} [{self.package}{needs}{lack}]"


def describe(kind: str, name: str, place: str) -> Entry:
    """Load a registered world or source without creating it, and check what it needs."""
    group = WORLDS if kind == "world" else SOURCES
    point = next((found for found in entry_points(group=group) if found.name == name), None)
    dist = point.dist if point is not None else None
    # an extra that the object's module is named after is needed
    parts = re.split(r"[.:]", place)
    needs = [extra for extra in (extras(dist.name) if dist else ()) if extra.replace("-", "_") in parts]
    package = f"{dist.name} {dist.version}" if dist is not None else place
    entry = Entry(kind, name, place, package, needs=[f"{dist.name}[{extra}]" for extra in needs if dist is not None])
    try:
        for extra in needs:
            check_extra(extra, dist.name if dist is not None else "")
    except SettingError as error:
        entry.missing = str(error)
    try:
        with redirect_stdout(sys.stderr), announced(f"importing {place}"):
            found = load_named(place)
            entry.about = first_line(found)
            if isinstance(found, type) and issubclass(found, TaskSource):
                entry.world = found.world
            if entry.missing is None and is_environment(found):
                _check_machine(found)
    except SettingError as error:
        entry.missing = entry.missing or str(error)
    except Exception as error:  # boundary: third-party packages
        entry.missing = entry.missing or f"{place} raised {type(error).__name__}: {error}"
    return entry


def _check_machine(environment: type[Environment]) -> None:
    kinds = inspect.signature(environment.check_machine).parameters.values()
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in kinds):
        check_machine_for(environment, {})


def first_line(documented: Any) -> str:
    """Return the first sentence's line of an object's docstring; "" without one."""
    own = vars(documented).get("__doc__") if isinstance(documented, type) else getattr(documented, "__doc__", None)
    return next(iter(inspect.cleandoc(own or "").splitlines()), "")


def catalogue() -> Iterator[Entry]:
    for kind, group in (("world", WORLDS), ("tasks", SOURCES)):
        for name, place in registered(group).items():
            yield describe(kind, name, place)


def sources_of(world: str) -> dict[str, type[TaskSource]]:
    """Return the sources of `world`'s tasks, by name. Raises SettingError if that of its own name is broken."""
    found: dict[str, type[TaskSource]] = {}
    for name in registered(SOURCES):
        try:
            source = source_of(name)
        except SettingError:
            if name == world:
                raise
            continue
        if source is not None and source.world == world:
            found[name] = source
    return found


@dataclass
class Subject:
    """The world or recipe that a command line names, and the name of its registered task source, if any."""

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
        fix = f"give a row by --row '{json.dumps(dict.fromkeys(needed, '...'))}', or name a recipe with rows"
        return SettingError("", f"{self.name} needs tasks with {', '.join(needed)}, and no task source has them", fix)


def open_subject(name: str, overrides: Sequence[str], options: Sequence[str], seconds: float | None = None) -> Subject:
    """Return the world, task source, `FILE.py:NAME` or recipe called `name`, with `overrides` of its source or recipe,
    constructor arguments `options` (`NAME=VALUE`) and a time limit of start, reset and call. Raises SettingError."""
    if Path(name).suffix in (".yaml", ".yml"):
        if options:
            raise SettingError("--option", f"got {options[0]} with a recipe", "set mcp_servers.NAME.options instead")
        recipe = _of_tools(name, overrides)
        for config in recipe.mcp_servers.values() if seconds is not None else ():
            config.timeout_seconds = config.pool.create_seconds = float(seconds or 0)
        return Subject(recipe.name, recipe)
    world, source = world_and_source(name, overrides)
    label = world.rpartition(":")[2]
    server: dict[str, Any] = {"module": world}
    if seconds is not None:
        server |= {"timeout_seconds": seconds, "pool": {"create_seconds": seconds}}
    data: dict[str, Any] = {"name": label, "mcp_servers": {label: server}}
    given = [f"mcp_servers.{label}.options.{option}" for option in options]
    if source is not None:
        data["data"] = {source: {}}
        given += [f"data.{source}.{text}" for text in overrides]
    with tempfile.TemporaryDirectory(prefix="agentfactory-world-") as folder:
        file = Path(folder) / "world.yaml"
        file.write_text(json.dumps(data))
        try:
            recipe = _of_tools(file, given)
        except SettingError as error:
            # the field as the command line has it
            raise error.at(field=error.field.removeprefix(f"data.{source}."), source="") from None
    return Subject(label, recipe, source)


def _of_tools(file: str | Path, overrides: Sequence[str]) -> Recipe:
    whole = load_recipe(file, overrides, "tools")
    check_recipe(whole, "tools")
    return stages_of(whole)[-1]


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
