"""Removal of folders whose content anyone may have changed. Run as a program, it removes one when its stdin closes.

It needs nothing but the standard library, because a small process runs it (`workspaces._root`).
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def remove(folder: Path) -> list[str]:
    """Remove a folder with everything in it, read-only folders too, however deep. Return what is left, with the
    reasons."""
    if _removed(folder):
        return []
    make_writable(folder)
    left = subprocess.run(["rm", "-rf", "--", folder], capture_output=True, text=True, errors="replace", check=False)
    return left.stderr.splitlines()


def make_writable(folder: Path) -> None:
    """Let the owner list and change `folder` and everything in it; what belongs to another owner stays as it is."""
    # no links are followed
    subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True, check=False)


def _removed(folder: Path) -> bool:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return not os.path.lexists(folder)
    except (OSError, RecursionError):  # a folder that is locked, or a very deep one
        return False
    return True


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    # servers, whose stdin closes too, may write for a moment more
    for _ in range(10):
        remove(Path(sys.argv[1]))
        time.sleep(0.5)
