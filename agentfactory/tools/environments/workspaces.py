"""Folders of chains: `${chain}` in a server's `args`, `env` and `cwd`. A folder exists as long as its process."""

import asyncio
import atexit
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mcp import StdioServerParameters

from agentfactory.base.config import CHAIN
from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import RefusedFileError, TreeCopy, opened_folder, remove
from agentfactory.base.processes.sandbox_limits import sandbox_user
from agentfactory.base.run_notices import notify

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REMOVE = 'chmod -R u+rwX -- "$1"; rm -rf -- "$1"'
_SWEEP = f"cat >/dev/null; for _ in 1 2 3 4 5 6 7 8 9 10; do {_REMOVE}; sleep 0.5; done"
"""Removes the folder $1 when its stdin closes, repeatedly, because servers may keep writing for a moment."""

_threads = ThreadPoolExecutor(4, "folders")
"""For copies and removals: many chains that begin together must not exhaust asyncio's own threads."""


@dataclass(frozen=True)
class ChainProgram:
    """A program whose processes each have a folder, a copy of `template` if set, which is removed at their end."""

    program: StdioServerParameters
    template: Path | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StdioServerParameters]:
        """Create a folder, yield the command that refers to it, and remove it. Raises OSError."""
        folder = make_folder()
        try:
            if self.template is not None:
                await in_folder_thread(_copy, self.template, folder)
            place = str(folder)
            args = [argument.replace(CHAIN, place) for argument in self.program.args]
            env = {key: value.replace(CHAIN, place) for key, value in (self.program.env or {}).items()}
            cwd = str(self.program.cwd).replace(CHAIN, place)
            yield self.program.model_copy(update={"args": args, "env": env, "cwd": cwd})
        finally:
            await in_folder_thread(remove_folder, folder)


async def in_folder_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)


def make_folder() -> Path:
    """Create a folder for a chain. If this process ends without removing it, a sweeper process does."""
    return Path(tempfile.mkdtemp(dir=_root()))


def give_to_sandbox(folder: Path) -> None:
    if (user := sandbox_user()) is None:
        return
    os.chown(folder, user, user)
    for _, folders, files, opened in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, user, user, dir_fd=opened, follow_symlinks=False)


def check_template(field: str, template: Path) -> int:
    """Return a template's size in bytes. Raises SettingError if it cannot be copied safely."""
    if not os.path.isdir(template):
        raise SettingError(field, f"{template} is not a folder", "name an existing one")
    tree = TreeCopy(template)
    try:
        tree.folder(template, None)
    except RefusedFileError as error:
        raise SettingError(field, f"{error.filename} {error.problem}", error.fix) from None
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
        raise SettingError(field, problem, "change its permissions") from None
    if tree.size > (free := shutil.disk_usage(tempfile.gettempdir()).free):
        problem = f"{template} has {tree.size / 2**20:.0f} MiB, and {tempfile.gettempdir()} {free / 2**20:.0f} MiB left"
        raise SettingError(field, f"each chain gets a copy: {problem}", "make it smaller, or set TMPDIR")
    return tree.size


def _copy(template: Path, folder: Path) -> None:
    try:
        with opened_folder(folder, folder) as into:
            TreeCopy(template).folder(template, into)
    except OSError as error:
        raise OSError(f"the workspace cannot be copied: {error}") from None


def remove_folder(folder: Path) -> None:
    """Remove a chain's folder, and notify the user of files that cannot be removed."""
    if left := remove(folder):
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        notify(logger, "chains' folders", f"the folder of a chain could not be removed: {left[0]}{more}")


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="agentfactory-chains-"))
    # a command that runs chains itself kills all its descendants before it ends, so its sweeper too
    atexit.register(subprocess.call, ["sh", "-c", _REMOVE, "sh", root])
    root.chmod(0o711)  # sandboxes of root run as nobody; each folder in it belongs to one user
    sweep = ["sh", "-c", _SWEEP, "sh", str(root)]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL  # its stdin closes with this process
    _sweepers.append(subprocess.Popen(sweep, cwd="/", stdin=pipe, stdout=none, stderr=none, start_new_session=True))
    return root


_sweepers: list["subprocess.Popen[bytes]"] = []
