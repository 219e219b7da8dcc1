"""`TreeCopy`: copy and check folders that others made, through descriptors, so that no step follows a link."""

import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from agentfactory.base.files.untrusted_files import (
    DEEPEST,
    RefusedFileError,
    create_regular,
    named,
    open_below,
    open_regular,
    opened_folder,
    refused,
    resolved,
)

_PIECE = 1 << 20
_ENTRY = 4096
"""Bytes that an entry takes at least, as in `disk_use`."""


class TreeCopy:
    """Copies of files and folders below the folder `within`, and their check, which is the same walk without a target.

    Copies keep content, times, and permissions without setuid, setgid and sticky bits. A link is copied as a link.

    Args:
        within: the folder that is never left.
        most: bytes of all copies together, of which each entry takes at least 4 KiB; None: any number.
        left_out: returns whether an entry with this status is skipped. With it, unreadable entries are skipped, too,
            and links may lead anywhere: the tree is a root file system. Without it, links must stay in `within`.

    Each method raises RefusedFileError for an entry that is not copied, OSError if one cannot be read or written.
    """

    def __init__(
        self, within: Path, most: int | None = None, left_out: Callable[[os.stat_result], bool] | None = None
    ) -> None:
        self._within, self._most, self._left_out = within, most, left_out
        self.size = 0
        """Bytes of all files so far."""
        self._entries = 0

    def folder(self, path: Path, into: int | None, mode: int | None = None) -> None:
        """Copy the content of a folder into the open folder `into`; None: check it only. `mode`: the permissions of all
        copies; None: those of the originals."""
        with opened_folder(path, self._within) as source:
            self._content(path, source, into, mode)

    def file(self, path: Path, into: int, name: str, mode: int | None = None) -> None:
        """Copy a file as `name` into the open folder `into`."""
        with opened_folder(path.parent, self._within) as source, named(path):
            self._entry(path, source, name, into, mode)

    def _content(self, path: Path, source: int, into: int | None, mode: int | None) -> None:
        for name in sorted(os.listdir(source)):
            try:
                with named(path / name):
                    self._entry(path / name, source, name, into, mode)
            except PermissionError:
                if self._left_out is None:
                    raise

    def _entry(self, path: Path, source: int, name: str, into: int | None, mode: int | None) -> None:
        """Copy the entry `path.name` of the open folder `source` as `name`."""
        status = os.stat(path.name, dir_fd=source, follow_symlinks=False)
        if self._left_out is not None and self._left_out(status):
            return
        if stat.S_ISLNK(status.st_mode):
            self._count(path, 0)
            if self._left_out is None:
                resolved(path.relative_to(self._within), self._within)
            if into is not None:
                os.symlink(os.readlink(path.name, dir_fd=source), name, dir_fd=into)
        elif stat.S_ISDIR(status.st_mode):
            self._count(path, 0)
            self._below(path, source, name, into, mode)
        elif stat.S_ISREG(status.st_mode):
            self._regular(path, source, name, into, mode)
        else:
            raise refused(path, stat.S_IFMT(status.st_mode))

    def _below(self, path: Path, source: int, name: str, into: int | None, mode: int | None) -> None:
        if len(path.relative_to(self._within).parts) > DEEPEST:
            raise RefusedFileError(path, f"is more than {DEEPEST} folders deep", "delete it")
        with ExitStack() as stack:
            opened = open_below(path, source)
            stack.callback(os.close, opened)
            if into is None:
                self._content(path, opened, None, mode)
                return
            try:
                os.mkdir(name, 0o700, dir_fd=into)
                is_new = True
            except FileExistsError:
                is_new = False
            made = open_below(Path(name), into)
            stack.callback(os.close, made)
            self._content(path, opened, made, mode)
            if is_new:
                _set(made, os.fstat(opened), mode)

    def _regular(self, path: Path, source: int, name: str, into: int | None, mode: int | None) -> None:
        with os.fdopen(open_regular(path, source), "rb") as file:
            status = os.fstat(file.fileno())
            self._count(path, status.st_size)
            if into is None:
                return
            with os.fdopen(create_regular(Path(name), into), "wb") as copy:
                left = status.st_size  # it may grow meanwhile
                while left and (piece := file.read(min(left, _PIECE))):
                    copy.write(piece)
                    left -= len(piece)
                copy.flush()
                _set(copy.fileno(), status, mode)

    def _count(self, path: Path, size: int) -> None:
        self.size, self._entries = self.size + size, self._entries + 1
        if self._most is not None and self.size + self._entries * _ENTRY > self._most:
            problem = f"does not fit: a chain has room for {self._most >> 20} MiB of copies"
            raise RefusedFileError(path, problem, "make it smaller")


def _set(copy: int, original: os.stat_result, mode: int | None) -> None:
    os.fchmod(copy, (original.st_mode if mode is None else mode) & 0o777)
    os.utime(copy, ns=(original.st_atime_ns, original.st_mtime_ns))
