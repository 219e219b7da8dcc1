"""Where our processes look for modules: what is installed comes first, the folders of user code come last."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_user_folders: list[str] = []

_CHECKOUT = Path(__file__).resolve().parents[2]
"""Where this package lies in a folder of source, that folder: its links `tools`, `rollout` and `trainers` are in it."""


def own_python(*arguments: str, executable: str | None = None) -> list[str]:
    """A command that runs a Python (default: this one) as ours: the current folder, where a user's `datasets/` or
    `mcp/` would be taken for the libraries of these names, is not on its import path."""
    return [executable or sys.executable, "-P", *arguments]


def append_folders(folders: Iterable[Path]) -> None:
    """Append folders of user code to the import path, where they are not on it already.

    A checkout of AgentFactory on the path goes behind them, so that a user's `tools/`, a package or a plain folder, is
    found before the checkout's link of that name.
    """
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
            _user_folders.append(folder)
    for entry in [entry for entry in sys.path if entry == str(_CHECKOUT) and _is_checkout()]:
        sys.path.remove(entry)
        sys.path.append(entry)


def user_folders() -> list[str]:
    """The folders that were appended, in the order in which modules are looked for."""
    return [*_user_folders]


def start_folder_last() -> None:
    """Move what Python has put first on the import path, the current folder (`python -m`) or the folder of the script,
    to its end. For the beginning of a command's main module, before it imports libraries."""
    if not sys.flags.safe_path:
        folder = sys.path.pop(0)
        append_folders([Path(folder or os.getcwd())])


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported; a folder that happens to bear its name, such as the `wandb/` that
    wandb writes, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_checkout() -> bool:
    # where this package is installed by a wheel, it lies among the libraries, which stay in front
    link = _CHECKOUT / "tools"
    return link.exists() and link.samefile(Path(__file__).parent)
