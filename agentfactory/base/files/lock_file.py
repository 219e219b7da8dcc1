"""Lock files that only users with write access to their folder can open. Even opening for reading permits locking."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import psutil


def open_lock(path: Path, make: bool = True) -> int:
    """Open a lock file, created if `make`, with a private mode. Follow no link, wait for no FIFO. Raises OSError."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    opened = os.open(path, flags | (os.O_CREAT if make else 0), 0o600)
    if stat.S_IMODE(os.fstat(opened).st_mode) != (mode := private_mode(path.parent)):
        with suppress(PermissionError):  # the file belongs to another user
            os.fchmod(opened, mode)
    return opened


def private_mode(folder: Path) -> int:
    """Return the file mode that permits locking only to users with write access to `folder`."""
    return 0o660 if folder.stat().st_mode & stat.S_IWGRP else 0o600


def holder(opened: int) -> str:
    """Describe the process that locks the open file, such as `pid 7 of user ann`, as far as the system reports it."""
    status = os.fstat(opened)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):  # no /proc
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and inode in words:
                return _described(int(words[words.index(inode) - 1]))
    return "a process that this one cannot see, such as in another container"


def _described(pid: int) -> str:
    try:
        return f"pid {pid} of user {psutil.Process(pid).username()}"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
