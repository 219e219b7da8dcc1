"""The recipe's section data: where tasks come from, and how often they are visited."""

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from agentfactory.base.config import Options, PositiveInt, Section
from agentfactory.base.errors import Fault, SettingError
from agentfactory.base.user_code.entry_points import SOURCES, load_named, registered


class TaskSource(Section):
    """Base class of task sources that packages register under the entry point `agentfactory.sources`. A recipe sets the
    source's fields below `data.NAME`."""

    paths: ClassVar[tuple[str, ...]] = ()
    """Fields that contain paths, which a recipe gives relative to its own file: dotted names; `*` stands for each
    entry, "" for a value given in place of the section."""
    world: ClassVar[str | None] = None
    """Name of the world that plays the tasks. Recipes that use the source have it among their tools."""
    agent: ClassVar[str | None] = None
    """`package.module:NAME` of a ClientAgent that plays the tasks and reports rewards, created without arguments.
    Recipes that use the source have it as rollout.agent, by the source's name."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks. Raise SettingError, with the field's name, if a field is invalid."""


def source_of(name: str) -> type[TaskSource] | None:
    """Return the class of the source registered as `name`, or None."""
    place = registered(SOURCES).get(name)
    if place is None:
        return None
    found: type[TaskSource] = load_named(place)
    return found


class DataConfig(Section):
    """One source of tasks: a file, a data set of the hub, a function, or a registered source."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    path: str | None = None
    """A file .jsonl, .json, .csv (each also as .gz) or .parquet, or the hub name of a dataset."""
    source: str | None = None
    """Alternative to path: `FILE.py:NAME` of a function or class that returns rows."""
    options: Options = {}
    """Arguments for source."""
    subset: str | None = None
    """Configuration name of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset."""
    columns: dict[str, str] = {}
    """Columns to rename: new name -> name in the file, such as {question: problem}. A dotted name copies a nested
    field."""
    shuffle: bool = True
    """Reshuffle the rows each epoch, using the recipe's seed."""
    limit: PositiveInt | None = None
    """Use only this many rows, from the start of the data."""

    @property
    def file(self) -> Path | None:
        """The file with the rows; None if they come from the hub or a source."""
        # file paths are absolute by now: a relative path is a hub name
        return Path(self.path) if self.path is not None and os.path.isabs(self.path) else None

    @property
    def registered(self) -> tuple[str, TaskSource] | None:
        """The name and section of the registered source; None if path or source gives the rows."""
        return next(iter((self.model_extra or {}).items()), None)

    @property
    def world(self) -> str | None:
        """The name of the world that plays the tasks; None if the recipe's tools do."""
        return None if self.registered is None else self.registered[1].world

    @property
    def origins(self) -> dict[str, Any]:
        """The fields that say where the rows come from; a valid section has one."""
        given = {name: value for name in ("path", "source") if (value := getattr(self, name)) is not None}
        return given | (self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _load_registered(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if hidden := sorted(registered(SOURCES).keys() & cls.model_fields):
            problem = f"an installed package registers the source {hidden[0]!r}, which is already a field of data"
            raise SettingError("", problem, f"uninstall {registered(SOURCES)[hidden[0]]}, or rename its source")
        found, errors = dict(given), []
        for name in [key for key in given if key not in cls.model_fields]:
            kind, value = source_of(name), found.pop(name)
            if kind is None:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=value))
            elif value is not None:
                try:
                    found[name] = kind.model_validate(value)
                except ValidationError as error:
                    for each in error.errors():
                        at = {"loc": (name, *each["loc"]), "input": each["input"], "ctx": each.get("ctx", {})}
                        errors.append(InitErrorDetails(type=each["type"], **at))  # type: ignore[typeddict-item]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return found

    def _faults(self) -> Iterator[Fault]:
        given = self.origins
        if len(given) != 1:
            others = [*registered(SOURCES), *({"sources"} & type(self).model_fields.keys())]
            *first, last = ["path", "source", *others]
            shown = (name if isinstance(value, TaskSource) else f"{name}={value}" for name, value in given.items())
            got = " and ".join(shown) or f"no {', '.join(first)} or {last}"
            fix = f"set one: path (a file of rows), source (FILE.py:NAME) or {' or '.join(others)}; null for the others"
            yield "", f"got {got}", fix
        (origin,) = given
        if self.options and self.source is None:
            yield "options", f"got {self.options} without source", "set it to null"
        if self.path is None and (self.subset is not None or self.split != "train"):
            name = "split" if self.subset is None else "subset"
            yield name, f"got {getattr(self, name)!r} with {origin}; it is for hub datasets", "remove it"


class CurriculumConfig(Section):
    """A curriculum that visits solved and hopeless tasks less often. A task's success rate is the mean `success` of its
    last group's chains, averaged with the previous rate; it is solved from 0.95 on, and hopeless up to 0.05."""

    solved: ClassVar[float] = 0.95
    """A task with at least this success rate is solved."""
    hopeless: ClassVar[float] = 0.05
    """A task with at most this success rate is hopeless."""

    visit: float = Field(default=0.25, ge=0.01, le=1)
    """Probability of visiting a solved or hopeless task when it comes up."""
