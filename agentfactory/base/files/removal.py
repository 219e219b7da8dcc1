"""Removal of folders with untrusted content. Run as a program, it removes a folder when its stdin closes.

It needs only the standard library, because a small sweeper process runs it (`workspaces._root`).
"""

import os
import secrets
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

_THREADS = 12
"""On ext4 the removal of a folder may wait a millisecond for the disk; threads overlap these waits."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(folder: Path) -> list[str]:
    """Remove a folder with everything in it, including read-only folders, in any number and depth. Follow no links.
    Return the remaining names, with the reasons."""
    try:
        top = _open_folder(str(folder), None)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{folder}: {error.strerror}"]
    removal = _Removal(top)
    try:
        below = removal.clear(top)
        with ThreadPoolExecutor(_THREADS) as pool:
            while below:
                below = list(chain.from_iterable(pool.map(removal.remove, below)))
    finally:
        os.close(top)
    if not removal.left:
        try:
            os.rmdir(folder)
        except OSError as error:
            return [f"{folder}: {error.strerror}"]
    return [f"{folder}: {left}" for left in removal.left]


def make_writable(folder: Path) -> None:
    """Let the owner list and change `folder` and everything in it. Entries of other owners stay unchanged."""
    # no links are followed
    subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True, check=False)


class _Removal:
    """The removal of the open folder `top`'s content. Folders that are not empty are first moved to `top`, so that
    paths stay short and folders can be removed in parallel."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._prefix, self._numbers = f".{secrets.token_hex(8)}-", count()
        self.left: list[str] = []

    def remove(self, name: str) -> list[str]:
        """Remove a folder of `top`. Return the new names, in `top`, of the folders that were in it."""
        below: list[str] = []
        try:
            os.rmdir(name, dir_fd=self._top)
        except OSError:  # it is not empty
            try:
                opened = _open_folder(name, self._top)
                try:
                    below = self.clear(opened)
                finally:
                    os.close(opened)
                os.rmdir(name, dir_fd=self._top)
            except OSError as error:
                self._leave(name, error)
        return below

    def clear(self, opened: int) -> list[str]:
        """Remove the files of an open folder and move its folders to `top`. Return the folders' new names."""
        below = []
        for name, is_folder in _entries(opened):
            try:
                if not is_folder:
                    os.unlink(name, dir_fd=opened)
                else:
                    below.append(name if opened == self._top else self._moved(name, opened))
            except FileNotFoundError:
                pass
            except OSError as error:
                self._leave(name, error)
        return below

    def _moved(self, name: str, opened: int) -> str:
        moved = f"{self._prefix}{next(self._numbers)}"
        try:
            os.rename(name, moved, src_dir_fd=opened, dst_dir_fd=self._top)
        except PermissionError:  # only a writable folder can be moved
            os.close(_open_folder(name, opened))
            os.rename(name, moved, src_dir_fd=opened, dst_dir_fd=self._top)
        return moved

    def _leave(self, name: str, error: OSError) -> None:
        self.left.append(f"{name}: {error.strerror}")


def _entries(opened: int) -> list[tuple[str, bool]]:
    """Return the names in an open folder, and whether each is a folder."""
    with os.scandir(opened) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder, and let its owner list and change it."""
    try:
        opened = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        _let_owner(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))
        return os.open(name, _FOLDER, dir_fd=parent)
    if os.fstat(opened).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        _let_owner(os.dup(opened))
    return opened


def _let_owner(opened: int) -> None:
    """Give all rights to the owner of an open folder, unless it is another user, and close it."""
    try:
        # by its descriptor, so that a link that replaces it is not followed
        os.chmod(f"/proc/self/fd/{opened}", stat.S_IRWXU)
    except PermissionError:
        pass
    finally:
        os.close(opened)


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    # servers, whose stdin closes too, may keep writing for a moment
    for _ in range(10):
        remove(Path(sys.argv[1]))
        time.sleep(0.5)
