"""The import path of our processes: installed packages first, folders of user code last."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3]
"""The source folder that contains this package, if any, and the links `tools`, `rollout` and `trainers`."""

_folders: list[str] = []
_appended: dict[str, bool] = {}
"""Folders that only we have added to the path -> True if a FILE.py is in the folder."""


def own_python(*arguments: str, executable: str | None = None) -> list[str]:
    """Return a command of a Python (default: this one) without the current folder on its import path."""
    return [executable or sys.executable, "-P", *arguments]


def append_folders(folders: Iterable[Path], of_file: bool = False) -> None:
    """Append folders to the import path: those `of_file`, then recipes', and a checkout of AgentFactory last."""
    for folder in map(str, folders):
        if folder not in _folders:
            _folders.append(folder)
        if folder not in sys.path or folder in _appended:
            _appended[folder] = of_file or _appended.get(folder, False)
    last = sorted(_appended, key=lambda folder: not _appended[folder])
    # a package installed from a wheel is among the libraries, which stay in front
    link = _CHECKOUT / "tools"
    if str(_CHECKOUT) in sys.path and link.exists() and link.samefile(Path(__file__).parents[1]):
        last = [*(folder for folder in last if folder != str(_CHECKOUT)), str(_CHECKOUT)]
    sys.path[:] = [*(entry for entry in sys.path if entry not in last), *last]


def user_folders() -> list[str]:
    return [*_folders]


def start_folder_last() -> None:
    """Move the import path's first entry to its end, before other imports; exit if another package hides this one."""
    package = sys.modules["agentfactory"]
    if getattr(package, "__file__", None) != str(Path(__file__).parents[2] / "__init__.py"):
        hiding = next(iter(package.__path__))
        sys.exit(f"agentfactory: {hiding} hides AgentFactory; fix: run `agentfactory`, or start in another folder")
    if not sys.flags.safe_path:
        folder = sys.path.pop(0)
        append_folders([Path(folder or os.getcwd())])


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported; a plain folder does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
