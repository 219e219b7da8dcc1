"""The installed worlds and task sources: their packages, and what they need."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.entry_points import SOURCES, WORLDS, load_named, registered
from agentfactory.base.user_code.extras import check_extra, extras
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.config import TaskSource, source_of
from agentfactory.tools.environments.environment import Environment, check_machine_for


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

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The entry in one line."""
        of = f" (tasks of {self.world})" if self.world and self.world != self.name else ""
        needs = f"; needs {', '.join(self.needs)}" if self.needs else ""
        lack = f"; missing: {self.missing}" if self.missing else ""
        return f"{self.kind:<6} {self.name:<18} {self.about or 'no docstring'}{of} [{self.package}{needs}{lack}]"


@dataclass(frozen=True)
class Registered:
    """A world or source as its package registers it."""

    kind: str
    name: str
    place: str

    @cached_property
    def point(self) -> EntryPoint | None:
        """The entry point."""
        group = WORLDS if self.kind == "world" else SOURCES
        return next((found for found in entry_points(group=group) if found.name == self.name), None)

    @property
    def needs(self) -> list[tuple[str, str]]:
        """The extra that the object's module is named after, with its distribution; empty if there is none."""
        distribution = self.point.dist.name if self.point is not None and self.point.dist is not None else ""
        parts = re.split(r"[.:]", self.place)
        known = extras(distribution) if distribution else {}
        return [(extra, distribution) for extra in known if extra.replace("-", "_") in parts]

    def describe(self) -> Entry:
        """Load the object, without creating it, and check what it needs."""
        dist = self.point.dist if self.point is not None else None
        package = f"{dist.name} {dist.version}" if dist is not None else self.place
        needs = [f"{distribution}[{extra}]" for extra, distribution in self.needs]
        entry = Entry(self.kind, self.name, self.place, package, needs=needs)
        try:
            for extra, distribution in self.needs:
                check_extra(extra, distribution)
        except SettingError as error:
            entry.missing = str(error)
        try:
            with redirect_stdout(sys.stderr), announced(f"importing {self.place}"):
                found = load_named(self.place)
                entry.about = first_line(found)
                if isinstance(found, type) and issubclass(found, TaskSource):
                    entry.world = found.world
                if entry.missing is None and isinstance(found, type) and issubclass(found, Environment):
                    _check_machine(found)
        except SettingError as error:
            entry.missing = entry.missing or str(error)
        except Exception as error:  # boundary: third-party packages
            entry.missing = entry.missing or f"{self.place} raised {type(error).__name__}: {error}"
        return entry


def _check_machine(environment: type[Environment]) -> None:
    """Check what every instance needs, unless the check itself needs options."""
    kinds = inspect.signature(environment.check_machine).parameters.values()
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in kinds):
        check_machine_for(environment, {})


def first_line(documented: Any) -> str:
    """Return the first sentence's line of an object's docstring; "" without one."""
    own = vars(documented).get("__doc__") if isinstance(documented, type) else getattr(documented, "__doc__", None)
    return next(iter(inspect.cleandoc(own or "").splitlines()), "")


def catalogue() -> Iterator[Entry]:
    """Yield every installed world and task source, by name."""
    for kind, group in (("world", WORLDS), ("tasks", SOURCES)):
        for name, place in registered(group).items():
            yield Registered(kind, name, place).describe()


def sources_of(world: str) -> dict[str, type[TaskSource]]:
    """Return the task sources whose tasks `world` plays, by name. Raises SettingError if one cannot be loaded that is
    named like the world; others are skipped."""
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
