"""Where our processes look for modules: what is installed comes first, the folders of user code come last."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
"""Where this package lies in a folder of source, that folder: its links `tools`, `rollout` and `trainers` are in it."""

_folders: list[str] = []
_appended: dict[str, bool] = {}
"""Of them, those that only we have put on the path; and whether a FILE.py lies there."""


def own_python(*arguments: str, executable: str | None = None) -> list[str]:
    """A command that runs a Python (default: this one) as ours: the current folder, where a user's `datasets/` or
    `mcp/` would be taken for the libraries of these names, is not on its import path."""
    return [executable or sys.executable, "-P", *arguments]


def append_folders(folders: Iterable[Path], of_file: bool = False) -> None:
    """Append folders of user code to the import path, where they are not on it already; those `of_file`, in which a
    FILE.py lies, before those of recipes.

    A checkout of AgentFactory on the path goes behind them, so that a user's `tools/`, a package or a plain folder, is
    found before the checkout's link of that name.
    """
    for folder in map(str, folders):
        if folder not in _folders:
            _folders.append(folder)
        if folder not in sys.path or folder in _appended:
            _appended[folder] = of_file or _appended.get(folder, False)
    last = sorted(_appended, key=lambda folder: not _appended[folder])
    if str(_CHECKOUT) in sys.path and _is_checkout():
        last = [*(folder for folder in last if folder != str(_CHECKOUT)), str(_CHECKOUT)]
    sys.path[:] = [*(entry for entry in sys.path if entry not in last), *last]


def user_folders() -> list[str]:
    """The folders of user code, in the order in which they came."""
    return [*_folders]


def start_folder_last() -> None:
    """Move what Python has put first on the import path, the current folder (`python -m`) or the folder of the script,
    to its end. For the beginning of a command's main module, before it imports anything else.

    Ends the process where another `agentfactory` in that folder hides this package.
    """
    package = sys.modules["agentfactory"]
    if getattr(package, "__file__", None) != str(Path(__file__).parents[1] / "__init__.py"):
        hiding = next(iter(package.__path__))
        sys.exit(f"agentfactory: {hiding} hides AgentFactory; fix: run `agentfactory`, or start in another folder")
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
