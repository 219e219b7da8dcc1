"""`View`: what a program in a sandbox sees of a file system."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentfactory.tools.errors import SettingError
from agentfactory.tools.sandbox.interpreter import is_public
from agentfactory.tools.sandbox.limits import sandbox_user

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""What is shown of the machine's own root: programs, libraries and settings, and nobody's files."""
_OURS = ("proc", "dev", "sys", "run", "tmp")
"""What every sandbox has of its own."""


@dataclass(frozen=True)
class View:
    """A root file system, read-only, with some folders that can be written. Only these parts of the machine exist."""

    root: Path = Path("/")
    """`/` shows the machine's programs, libraries and /etc; any other folder is shown as a whole."""
    readable: tuple[Path, ...] = ()
    """Further files and folders of the machine, read-only, at the place where they are."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Place inside -> folder of the machine, writable."""
    start: str = "/"
    """The folder in which the program starts."""
    user: int = 1000
    """The number that its user has inside; outside it is the user of this process, or nobody for root."""

    def of_root(self) -> list[str]:
        """Return the arguments of bwrap that show the root, and make way for the places in it of all else."""
        points = [PurePosixPath(place) for place in (*self.folders, *map(str, self._further()))]
        arguments: list[str] = []
        names = sorted(os.listdir(self.root))
        for name in names:
            if name not in _OURS and (self.root != Path("/") or name in _SYSTEM):
                arguments += self._show(PurePosixPath("/", name), points)
        return [*arguments, "--dir", "/run"]

    def of_the_rest(self) -> list[str]:
        """Return the arguments that show further files and folders; they may lie in what every sandbox has of its
        own."""
        arguments: list[str] = []
        for path in self._further():
            arguments += ["--ro-bind", str(path), str(path)]
        for place, folder in sorted(self.folders.items()):
            arguments += ["--bind", str(folder), place]
        return arguments

    def _further(self) -> list[Path]:
        shown = [Path("/", name) for name in _SYSTEM] if self.root == Path("/") else []
        return sorted(path for path in set(self.readable) if not any(path.is_relative_to(one) for one in shown))

    def _show(self, place: PurePosixPath, points: list[PurePosixPath]) -> list[str]:
        """Show a file, link or folder of the root; entry by entry, if a place below it has to be made first."""
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


def check_readable(field: str, paths: Iterable[Path]) -> None:
    """Raise SettingError if sandboxes cannot show one of these files and folders of the machine."""
    for path in paths:
        if path == Path("/"):
            raise SettingError(field, "got /, which has everything", "name the files and folders that are needed")
        if not path.exists():
            raise SettingError(field, f"there is no {path}", "name an existing file or folder")
        if sandbox_user() is not None and not is_public(path):
            problem = f"{path} can be read by its owner only, and the sandboxes of root run as nobody"
            raise SettingError(field, problem, "put it where everyone may read, or run as an ordinary user")
