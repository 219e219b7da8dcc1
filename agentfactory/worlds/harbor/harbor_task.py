"""`HarborTask`: the record of a task that a row holds, and the files that it names."""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Self

from agentfactory.base.files.untrusted_files import entries_of, refused
from agentfactory.base.processes.environment import is_named, named
from agentfactory.worlds.harbor.dockerfile import Copy, joined

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_SHORTEST_SECRET = 8
"""Shorter values are no keys, and may occur in any text."""


def names_without_default(text: str) -> list[str]:
    """Return the variables in a text that must have a value."""
    return [match[1] for match in _VARIABLE.finditer(text) if match[2] is None]


def expanded(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts by name with `${NAME}` and `${NAME:-default}` replaced; the default replaces a variable that the
    recipe does not name, or that is not set. Raises ValueError if it has no default."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2]) if is_named(match[1]) else match[2]
        if found is None:
            raise ValueError(f"task.toml: {match[1]} is not set, or not named in the recipe; fix: env: [{match[1]}]")
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in texts.items()}


def masked(text: str) -> str:
    """Return a text with `***` in place of the values of variables that the recipe names."""
    values = {os.environ.get(name, "") for name in named()}
    for value in sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(value, "***")
    return text


@dataclass(frozen=True)
class Image:
    """The root file system used in place of an image."""

    root: str
    run_done: bool = False
    """True if the root already has the results of its tasks' RUN instructions."""
    writable: tuple[str, ...] = ()
    """Additional folders that tasks may change; each chain gets a copy."""


@dataclass(frozen=True)
class HarborTask:
    folder: str
    name: str
    root: str
    workdir: str
    env: dict[str, str]
    copies: list[Copy]
    writable: list[str]
    """Folders that may be changed, none of them inside another."""
    agent_seconds: float | None = None
    verifier_seconds: float = 600.0
    environment_env: dict[str, str] = field(default_factory=dict)
    """Variables of task.toml, as written there, such as `${NAME}`; of all processes, of the tests, of the solution."""
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    storage_mb: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "copies": [Copy(**copy) for copy in data["copies"]]})


def matching(folder: Path, pattern: str) -> dict[Path, int]:
    """Return the files and folders that a source of COPY names. Raises RefusedFileError if a link leads to them."""
    found = {folder / "environment": stat.S_IFDIR}
    for part in PurePosixPath(joined("/", pattern)).parts[1:]:
        found = {
            place / name: kind
            for place, above in found.items()
            if above == stat.S_IFDIR
            for name, kind in entries_of(place, folder).items()
            if fnmatchcase(name, part)
        }
        for path, kind in found.items():
            if kind not in (stat.S_IFDIR, stat.S_IFREG):
                raise refused(path, kind)
    return found
