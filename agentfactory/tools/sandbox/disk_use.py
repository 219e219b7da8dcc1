"""Disk usage of untrusted programs' folders, with deleted open files. Run as a program on folders, also beyond file
modes (`bubblewrap.reader`), it prints JSON, and needs only the standard library."""

import errno
import json
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time

_LEAST_BYTES = 4096
"""Size counted for an entry without blocks, which takes an inode: empty file, short link, folder on XFS or Btrfs."""
_MOST_ENTRIES = 1_000_000
_DEEPEST = 128
"""Maximum nesting of folders. Each open folder takes one of this process's limited descriptors."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class DiskUse:
    size: int = 0
    """Bytes: blocks of files and folders, at least one block for each; hard links count once."""
    entries: int = 0
    problem: str | None = None
    """Reason why the measurement is incomplete, worded about the program that owns the folders."""
    locked: bool = False
    """True if the problem is a folder's mode, which its owner chose."""
    seconds: float = 0.0
    """Processor time of measuring."""
    _inodes: set[tuple[int, int]] = field(default_factory=set)
    """Counted files that have several names or none."""

    def add(self, status: os.stat_result) -> None:
        self.entries += 1
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink != 1:
            if (inode := (status.st_dev, status.st_ino)) in self._inodes:
                return
            self._inodes.add(inode)
        self.size += max(status.st_blocks << 9, _LEAST_BYTES)

    def lock(self, kind: str, name: str, verb: str) -> None:
        """Note an entry whose mode makes its size unknown."""
        self.problem, self.locked = f"its {kind} {name[:40]!r} cannot be {verb}, so its size is unknown", True


def measure(folders: Iterable[Path]) -> DiskUse:
    use, begun = DiskUse(), thread_time()
    for folder in folders:
        try:
            _add_folder(use, os.open(folder, _FOLDER))
        except PermissionError:
            use.lock("folder", folder.name, "listed")
    use.seconds = thread_time() - begun
    return use


def add_deleted(use: DiskUse, folders: Iterable[Path], processes: Iterable[int]) -> None:
    """Add deleted files that are open in one of `processes`, on the file systems of `folders`."""
    begun = thread_time()
    devices = {os.stat(folder).st_dev for folder in folders}
    for process in processes:
        with suppress(OSError):  # the process has ended, or this user may not inspect it
            for thread in os.listdir(f"/proc/{process}/task"):
                for descriptor in os.listdir(opened := f"/proc/{process}/task/{thread}/fd"):
                    with suppress(OSError):
                        status = os.stat(f"{opened}/{descriptor}")
                        if status.st_nlink == 0 and status.st_dev in devices:
                            use.add(status)
    use.seconds += thread_time() - begun


def _add_folder(use: DiskUse, top: int) -> None:
    # each step opens one name of an open folder: a path may be longer than the system takes, and parts of it may change
    open_folders = [(top, _add_entries(use, top))]
    try:
        while open_folders and use.problem is None:
            opened, below = open_folders[-1]
            if not below:
                open_folders.pop()
                os.close(opened)
                continue
            name = below.pop()
            if len(open_folders) > _DEEPEST:
                use.problem = f"it had folders nested more than {_DEEPEST} deep"
                continue
            try:
                inner = os.open(name, _FOLDER, dir_fd=opened)
            except PermissionError:
                use.lock("folder", name, "listed")
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
            else:
                open_folders.append((inner, []))
                open_folders[-1] = (inner, _add_entries(use, inner))
    finally:
        for opened, _ in open_folders:
            os.close(opened)


def _add_entries(use: DiskUse, opened: int) -> list[str]:
    below = []
    with os.scandir(opened) as entries:
        for entry in entries:
            if use.entries >= _MOST_ENTRIES:
                use.problem = f"it had more than {_MOST_ENTRIES} files"
                break
            try:
                use.add(entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue
            except PermissionError:
                use.lock("file", entry.name, "read")
                break
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
    return below


if __name__ == "__main__":
    found = measure(map(Path, sys.argv[1:]))
    print(json.dumps([found.size, found.entries, found.problem, found.locked, found.seconds]))
