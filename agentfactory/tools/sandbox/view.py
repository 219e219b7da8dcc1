"""`View`: the file system of a program in a sandbox."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import resolved
from agentfactory.tools.sandbox.interpreter import is_public
from agentfactory.tools.sandbox.limits import NO_SANDBOX, sandbox_user

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""Visible entries of the machine's own root: programs, libraries and settings, but no user's files."""
_OURS = ("proc", "dev", "sys", "run", "tmp")
"""Entries that every sandbox creates for itself."""


@dataclass(frozen=True)
class View:
    """A read-only root file system with some writable folders. No other part of the machine is visible."""

    root: Path = Path("/")
    """`/` shows the machine's programs, libraries and /etc; any other folder is shown as a whole."""
    readable: tuple[Path, ...] = ()
    """Further files and folders of the machine, read-only, at their own paths."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Path inside -> writable folder of the machine."""
    start: str = "/"
    """The folder in which the program starts."""
    user: int = 1000
    """User id inside; outside, it is the user of this process, or nobody for root."""

    def of_root(self) -> list[str]:
        """Return bwrap's arguments that mount the root, and leave room in it for all other mount points."""
        points = [PurePosixPath(place_in(self.root, place)) for place in (*self.folders, *map(str, self._further()))]
        arguments: list[str] = []
        names = sorted(os.listdir(self.root))
        for name in names:
            if is_shown(self.root, name):
                arguments += self._show(PurePosixPath("/", name), points)
        return [*arguments, "--dir", "/run"]

    def of_the_rest(self) -> list[str]:
        """Return bwrap's arguments that mount further files and folders, possibly below the sandbox's own entries."""
        arguments: list[str] = []
        for path in self._further():
            arguments += ["--ro-bind", str(path), place_in(self.root, str(path))]
        for place, folder in sorted(self.folders.items()):
            arguments += ["--bind", str(folder), place_in(self.root, place)]
        return arguments

    def _further(self) -> list[Path]:
        shown = [Path("/", name) for name in _SYSTEM] if self.root == Path("/") else []
        return sorted(path for path in set(self.readable) if not any(path.is_relative_to(one) for one in shown))

    def _show(self, place: PurePosixPath, points: list[PurePosixPath]) -> list[str]:
        """Mount a file, link or folder of the root; entry by entry, if a mount point must be created below it."""
        source = self.root / place.relative_to("/")
        if source.is_symlink():
            return ["--symlink", os.readlink(source), str(place)]
        below = [point for point in points if place in point.parents]
        if all(os.path.lexists(self.root / point.relative_to("/")) for point in below):
            return ["--ro-bind", str(source), str(place)]
        arguments = ["--dir", str(place)]
        for name in sorted(os.listdir(source)):
            if place / name not in points:
                arguments += self._show(place / name, below)
        return arguments


def is_shown(root: Path, name: str) -> bool:
    """Return whether sandboxes show the entry `name` of a root file system."""
    return name not in _OURS and (root != Path("/") or name in _SYSTEM)


def place_in(root: Path, place: str) -> str:
    """Return the path `place` of a sandbox with the links of its root file system followed inside. bwrap would follow
    them on the machine, and create mount points there. Raises RefusedFileError if they have no end."""
    if not is_shown(root, place.split("/")[1]):
        return place
    return "/" + "/".join(resolved(place, root, is_root=True).relative_to(root).parts)


def check_readable(field: str, paths: Iterable[Path]) -> None:
    """Raise SettingError if sandboxes cannot mount one of these files and folders of the machine."""
    for path in paths:
        if path == Path("/"):
            raise SettingError(field, "got /, the whole machine", "name only the files and folders that are needed")
        if not path.exists():
            raise SettingError(field, f"there is no {path}", "name an existing file or folder")
        if sandbox_user() is not None and not is_public(path):
            problem = f"{path} can be read by its owner only, and the sandboxes of root run as nobody"
            fix = f"put it where every user can read it, run as an ordinary user, {NO_SANDBOX}"
            raise SettingError(field, problem, fix)
