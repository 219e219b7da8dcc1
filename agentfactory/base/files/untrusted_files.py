"""Files in untrusted folders: opened, copied, checked and removed without following links, with bounded sizes."""

import itertools
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path, PurePath
from typing import BinaryIO

JSON_VALUES = 4 << 20
"""Maximum number of values: a short file can take a hundred times its length; a large tokenizer has 2 million."""
LINE_BYTES = 128 << 20

_KINDS = {
    stat.S_IFLNK: "a link, which is not followed",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_DEEPEST = 64
_MOST_LINKS = 40
_PIECE = 1 << 20
_ENTRY = 4096
"""Bytes that an entry takes at least, as in `disk_use`."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RefusedFileError(OSError):
    """A file or folder that is not opened; the message gives the path, the reason and a fix."""

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        super().__init__(None, f"{problem}; fix: {fix}", str(path))
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        # a name can hold the control sequences of a terminal
        return f"{printable(self.filename)} {self.strerror}"


def open_file(path: Path, within: Path | None = None) -> BufferedReader:
    """Open the regular file `path` for reading, without following a link below the folder `within`; None: a path from
    the user, whose links are followed. Raises RefusedFileError for anything but a regular file, and OSError."""
    with nullcontext() if within is None else opened_folder(path.parent, within) as folder:
        return os.fdopen(_open_regular(path, folder), "rb")


def create_file(path: Path, within: Path) -> BufferedWriter:
    """Open the file `path` for writing, empty, without following a link below the folder `within`. Missing folders are
    made, and an existing file keeps its mode. Raises RefusedFileError for anything but a regular file, and OSError."""
    with opened_folder(path.parent, within, make=True) as folder:
        return os.fdopen(_open_regular(path, folder, write=True), "wb")


def read_file(path: Path, most: int, within: Path | None = None) -> bytes:
    """Return the content of a file, opened by `open_file`. Raises RefusedFileError if it has more than `most` bytes."""
    with open_file(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        # it may have grown since, or be a file of /proc, which has no size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise RefusedFileError(path, f"has more than {most:,} bytes", "replace it with the file that was written")
    return content


def read_json(path: Path, within: Path | None = None, most: int = 64 << 20) -> dict[str, object]:
    """Return the JSON object in a file, read by `read_file`. Raises ValueError for anything else or too many values."""
    content = read_file(path, most, within)
    if not has_few_values(content):
        fix = "replace it with the file that was written"
        raise RefusedFileError(path, f"has more than {JSON_VALUES:,} values", fix)
    # imported here, because the sandbox's Python may lack it
    from pydantic_core import from_json

    found = from_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def has_few_values(content: bytes, most: int = JSON_VALUES) -> bool:
    """Return whether JSON has at most about `most` values. Commas and brackets, which begin one, count in texts too."""
    return sum(map(content.count, (b",", b"[", b"{"))) <= most


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with the control sequences of a terminal escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def terminal_text(text: str) -> str:
    """Return lines of text with control characters, which a terminal obeys, and lone surrogates escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def lines_of(file: BinaryIO, most: int = LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file. Raises ValueError at a line of more than `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise ValueError(f"the line has more than {most:,} bytes; fix: leave it out")
        yield line


def entries_of(path: Path, within: Path) -> dict[str, int]:
    """Return the names in a folder, sorted, with the type of each (`stat.S_IFREG`, ...), without following a link below
    `within`. A folder that is missing has none. Raises RefusedFileError if it is no folder."""
    kinds: dict[str, int] = {}
    with suppress(FileNotFoundError), opened_folder(path, within) as folder:
        for name in sorted(os.listdir(folder)):
            with suppress(FileNotFoundError):  # deleted meanwhile
                kinds[name] = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return kinds


def check_tree(path: Path, within: Path, depth: int | None = None) -> None:
    """Raise RefusedFileError unless a folder has only regular files and folders, down to `depth` levels (None: all)."""
    for name, kind in entries_of(path, within).items():
        if kind == stat.S_IFDIR:
            if len((path / name).relative_to(within).parts) > _DEEPEST:
                raise RefusedFileError(path / name, f"is more than {_DEEPEST} folders deep", "delete it")
            if depth != 0:
                check_tree(path / name, within, None if depth is None else depth - 1)
        elif kind != stat.S_IFREG:
            raise refused(path / name, kind)


def refused(path: Path, kind: int) -> RefusedFileError:
    fix = "put the file or folder itself there" if kind == stat.S_IFLNK else "replace it, or delete it"
    return RefusedFileError(path, f"is {_KINDS.get(kind, 'a regular file')}", fix)


def resolved(name: str | PurePath, within: Path, is_root: bool = False) -> Path:
    """Return the path to which `name` leads, with all links below `within` followed. `is_root`: `within` is the root of
    a file system, as after chroot. Raises RefusedFileError if it leads out of `within`, or its links have no end."""
    waiting, found, links = [*reversed(PurePath(name).parts)], list[str](), 0
    while waiting:
        part = waiting.pop()
        is_out = part.startswith("/") or (part == ".." and not found)
        if is_out and not is_root:
            fix = "put the file itself there, or a relative link to another place in it"
            raise RefusedFileError(within / name, f"leads out of {within}", fix)
        if is_out:
            found = []
        elif part == "..":
            found.pop()
        else:
            try:
                target = os.readlink(within.joinpath(*found, part))
            except OSError:  # no link, or missing
                found.append(part)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise RefusedFileError(within / name, "is a link that leads to itself", "remove it")
            waiting += reversed(PurePath(target).parts)
    return within.joinpath(*found)


@contextmanager
def opened_folder(path: Path, within: Path, make: bool = False) -> Iterator[int]:
    """Open the folder `path` as a descriptor, without following a link below `within`, which may itself be reached by
    links. `make`: missing folders are made. Raises RefusedFileError if it is no folder, and OSError."""
    parts = path.relative_to(within).parts
    if ".." in parts:
        raise RefusedFileError(path, f"leads out of {within}", "name a file in it")
    at, folder = within, os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parts:
            at /= name
            if make:
                with suppress(FileExistsError), _named(at):
                    os.mkdir(name, dir_fd=folder)
            below = _open_below(at, folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _open_below(path: Path, folder: int) -> int:
    """Open the folder `path.name` of an open folder, without following a link. Raises like `opened_folder`."""
    try:
        return os.open(path.name, _FOLDER, dir_fd=folder)
    except OSError as error:
        # a link is `not a directory` here
        raise _explained(error, path, path.name, folder, stat.S_IFDIR) from None


def _open_regular(path: Path, folder: int | None, write: bool = False) -> int:
    """Open the regular file `path.name` of an open folder (None: `path`, following links); `write`: make it empty."""
    follow, name = folder is None, str(path) if folder is None else path.name
    flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    flags |= os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
    try:
        # opening a device or a FIFO has effects, so look first; if it is replaced meanwhile, the flags limit them
        if not write:
            _check_regular(path, os.stat(name, dir_fd=folder, follow_symlinks=follow))
        descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    except RefusedFileError:
        raise
    except OSError as error:
        raise _explained(error, path, name, folder, stat.S_IFREG) from None
    try:
        _check_regular(path, os.fstat(descriptor))
    except RefusedFileError:
        os.close(descriptor)
        raise
    if write:
        os.ftruncate(descriptor, 0)
    return descriptor


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give an error about a name in an open folder the whole path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RefusedFileError) or error.filename is None or os.path.isabs(error.filename):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise refused(path, stat.S_IFMT(status.st_mode))


def _explained(error: OSError, path: Path, name: str, folder: int | None, wanted: int) -> OSError:
    """Return the error for `path`: refused if it is of another type than `wanted`, else the system's own."""
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=folder is None).st_mode)
    except OSError:
        kind = wanted
    if kind != wanted:
        return refused(path, kind)
    return type(error)(error.errno, error.strerror, str(path))


class TreeCopy:
    """Copies of files and folders below the folder `within`, and their check, which is the same walk without a target.

    Copies keep content, times, and permissions without setuid, setgid and sticky bits. A link is copied as a link. All
    copies together have at most `most` bytes, at least 4 KiB for each entry (None: any number).

    `left_out` returns whether an entry with this status is skipped. With it, unreadable entries are skipped, too, and
    links may lead anywhere: the tree is a root file system. Without it, links must stay in `within`.

    Each method raises RefusedFileError for an entry that is not copied, OSError if one cannot be read or written."""

    def __init__(
        self, within: Path, most: int | None = None, left_out: Callable[[os.stat_result], bool] | None = None
    ) -> None:
        self._within, self._most, self._left_out = within, most, left_out
        self.size = 0
        self._entries = 0

    def folder(self, path: Path, into: int | None, mode: int | None = None) -> None:
        """Copy a folder's content into the open folder `into` (None: only check it), with `mode` or the original's."""
        with opened_folder(path, self._within) as source:
            self._content(path, source, into, mode)

    def file(self, path: Path, into: int, name: str, mode: int | None = None) -> None:
        """Copy a file as `name` into the open folder `into`."""
        with opened_folder(path.parent, self._within) as source, _named(path):
            self._entry(path, source, name, into, mode)

    def _content(self, path: Path, source: int, into: int | None, mode: int | None) -> None:
        for name in sorted(os.listdir(source)):
            try:
                with _named(path / name):
                    self._entry(path / name, source, name, into, mode)
            except PermissionError:
                if self._left_out is None:
                    raise

    def _entry(self, path: Path, source: int, name: str, into: int | None, mode: int | None) -> None:
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
        if len(path.relative_to(self._within).parts) > _DEEPEST:
            raise RefusedFileError(path, f"is more than {_DEEPEST} folders deep", "delete it")
        with ExitStack() as stack:
            stack.callback(os.close, opened := _open_below(path, source))
            if into is None:
                self._content(path, opened, None, mode)
                return
            is_new = True
            try:
                os.mkdir(name, 0o700, dir_fd=into)
            except FileExistsError:
                is_new = False
            stack.callback(os.close, made := _open_below(Path(name), into))
            self._content(path, opened, made, mode)
            if is_new:
                _set(made, os.fstat(opened), mode)

    def _regular(self, path: Path, source: int, name: str, into: int | None, mode: int | None) -> None:
        with os.fdopen(_open_regular(path, source), "rb") as file:
            status = os.fstat(file.fileno())
            self._count(path, status.st_size)
            if into is None:
                return
            with os.fdopen(_open_regular(Path(name), into, write=True), "wb") as copy:
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


def remove(folder: Path) -> list[str]:
    """Remove a folder of any depth, without following links. Return the remaining names, with the reasons."""
    if left := _removed(folder):
        # chmod -R follows no links, and leaves entries of other owners unchanged
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True, check=False)
        left = _removed(folder)
    return left


def _removed(folder: Path) -> list[str]:
    """Remove a folder as far as its rights allow. Return the remaining names, with the reasons."""
    left: list[str] = []
    prefix, numbers = f".{secrets.token_hex(8)}-", itertools.count()

    def clear(name: str) -> list[str]:
        """Remove a folder of `top`, or its files. Move its folders to `top`, for short paths; return their names."""
        below: list[str] = []
        try:
            opened = os.open(name, _FOLDER, dir_fd=top)
            try:
                with os.scandir(opened) as entries:
                    found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
                for entry, is_folder in found:
                    moved = entry if name == "." else f"{prefix}{next(numbers)}"
                    if not is_folder:
                        os.unlink(entry, dir_fd=opened)
                        continue
                    if moved != entry:
                        os.rename(entry, moved, src_dir_fd=opened, dst_dir_fd=top)
                    below.append(moved)
            finally:
                os.close(opened)
            if name != ".":
                os.rmdir(name, dir_fd=top)
        except FileNotFoundError:
            pass
        except OSError as error:
            left.append(f"{folder}/{name}: {error.strerror}")
        return below

    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{folder}: {error.strerror}"]
    try:
        # on ext4 the removal of a folder may wait milliseconds for the disk; threads overlap these waits
        with ThreadPoolExecutor(12) as pool:
            below = clear(".")
            while below:
                below = [*itertools.chain.from_iterable(pool.map(clear, below))]
        if not left:
            os.rmdir(folder)
    except OSError as error:
        left.append(f"{folder}: {error.strerror}")
    finally:
        os.close(top)
    return left
