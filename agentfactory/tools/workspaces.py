"""Folders of chains: `${chain}` in a server's `args`, `env` and `cwd`. A process has its folder from its start to its
end."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mcp import StdioServerParameters

from agentfactory.tools.config import CHAIN
from agentfactory.tools.errors import SettingError


@dataclass(frozen=True)
class ChainProgram:
    """A program of which each process has a folder: a copy of `template`, if there is one.

    When the process has ended, its folder is removed, or moved into `kept`.
    """

    program: StdioServerParameters
    template: Path | None = None
    kept: Path | None = None

    @asynccontextmanager
    async def running(self, chain: Callable[[], str]) -> AsyncIterator[StdioServerParameters]:
        """Make a folder and yield the command that refers to it. `chain` names it if it is kept; one that no chain
        used is not."""
        folder = Path(tempfile.mkdtemp(dir=_root()))
        try:
            if self.template is not None:
                await asyncio.to_thread(shutil.copytree, self.template, folder, symlinks=True, dirs_exist_ok=True)
                folder.chmod(0o700)
            yield self._command(str(folder))
        finally:
            if self.kept is not None and chain():
                self.kept.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(shutil.move, folder, _free(self.kept / re.sub(r"[^\w.-]", "-", chain())))
            else:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _command(self, folder: str) -> StdioServerParameters:
        program = self.program
        return program.model_copy(
            update={
                "args": [argument.replace(CHAIN, folder) for argument in program.args],
                "env": {key: value.replace(CHAIN, folder) for key, value in (program.env or {}).items()},
                "cwd": str(program.cwd).replace(CHAIN, folder),
            }
        )


def check_template(field: str, template: Path) -> int:
    """Return the bytes of a template.

    Raises SettingError if it is no folder, has links that lead out of it (through which a chain could write anywhere)
    or special files, or is larger than the free space for one copy.
    """
    if not template.is_dir():
        raise SettingError(field, f"{template} is not a folder", "name an existing one")
    whole, root = 0, template.resolve()
    for folder, _, files in os.walk(template):
        for path in (Path(folder) / name for name in os.listdir(folder)):
            if path.is_symlink():
                if path.readlink().is_absolute() or not path.resolve().is_relative_to(root):
                    raise SettingError(field, f"{path} is a link out of the folder", "put the file itself there")
            elif not path.is_dir() and not path.is_file():
                raise SettingError(field, f"{path} is neither a file nor a folder", "remove it")
        whole += sum((Path(folder) / name).lstat().st_size for name in files)
    if whole > (free := shutil.disk_usage(tempfile.gettempdir()).free):
        problem = f"{template} has {whole / 2**20:.0f} MiB, and {tempfile.gettempdir()} {free / 2**20:.0f} MiB left"
        raise SettingError(field, f"each chain gets a copy: {problem}", "make it smaller, or set TMPDIR")
    return whole


def _free(path: Path) -> Path:
    """Return `path`, or the first of `path-2`, `path-3`, ... that does not exist: a chain may be tried again."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@cache
def _root() -> Path:
    """Return the folder of this process's folders. A small process removes it when this one is gone, however it
    ended."""
    root = Path(tempfile.mkdtemp(prefix="agentfactory-chains-"))
    # its stdin closes with this process; the servers, whose stdin closes too, may write for a moment more
    sweeper = subprocess.Popen(
        [sys.executable, "-S", "-c", _SWEEPER, root],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _sweepers.append(sweeper)
    return root


_sweepers: list["subprocess.Popen[bytes]"] = []
_SWEEPER = """
import os, shutil, sys, time
while os.read(0, 4096):
    pass
for _ in range(10):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.5)
"""
