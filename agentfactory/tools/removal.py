"""Removal of folders whose content anyone may have changed. Run as a program, it removes one when its stdin closes.

It needs nothing but the standard library, because a small process runs it (`workspaces._root`).
"""

import os
import shutil
import stat
import sys
import time
from pathlib import Path


def remove(folder: Path) -> list[str]:
    """Remove a folder with everything in it, read-only folders too. Return what is left, with the reasons."""
    if _remove(folder):
        make_writable(folder)
        return _remove(folder)
    return []


def make_writable(folder: Path) -> None:
    """Let the owner list and change `folder` and every folder in it; those of another owner stay as they are."""
    _open(folder)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            _open(Path(path) / name)


def _open(folder: Path) -> None:
    try:
        mode = folder.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)
    except OSError:
        return  # of another owner, or gone: what cannot be removed is reported


def _remove(folder: Path) -> list[str]:
    left: list[str] = []

    def note(function: object, path: str, error: object) -> None:
        reason = error[1] if isinstance(error, tuple) else error
        if not isinstance(reason, FileNotFoundError):
            left.append(f"{path}: {getattr(reason, 'strerror', None) or reason}")

    shutil.rmtree(folder, onerror=note)
    return left


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    # servers, whose stdin closes too, may write for a moment more
    for _ in range(10):
        remove(Path(sys.argv[1]))
        time.sleep(0.5)
