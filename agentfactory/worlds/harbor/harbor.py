"""`Harbor`: the shell on the files of a Harbor task, whose tests judge the chain."""

import asyncio
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

from agentfactory.tools.environments.workspaces import give_to_sandbox, in_folder_thread, make_folder
from agentfactory.tools.messages import EnvironmentReward
from agentfactory.tools.prebuilt.shell import PATH, Shell
from agentfactory.tools.sandbox.disk_use import measure
from agentfactory.tools.sandbox.limits import ProgramLimits, sandbox_user
from agentfactory.tools.sandbox.program import ProgramResult, run_program
from agentfactory.tools.sandbox.view import View
from agentfactory.worlds.harbor.dockerfile import Copy
from agentfactory.worlds.harbor.tasks import HarborTask

_MOST_BYTES = 1 << 20
"""Longest file with a reward."""


class Harbor(Shell):
    """The tool `shell` for tasks of `data.harbor`. The reward is that of the task's tests.

    Tests run after the agent's processes have ended, in a sandbox of their own: on the files that the agent left, with
    `/tests` and `/logs/verifier` from copies that no process of the agent ever saw.

    Args:
        seconds: time limit of a command.
        processes: processes and threads at a time.
        memory_mb: memory of all processes together, in MiB, where the task does not say it.
        disk_mb: size of the files that a chain may change, in MiB, where the task does not say it.
        output_characters: text of a command that the model sees: its beginning and its end.
    """

    def __init__(
        self,
        seconds: float = 120.0,
        processes: int = 256,
        memory_mb: int = 2048,
        disk_mb: int = 2048,
        output_characters: int = 10_000,
    ) -> None:
        super().__init__(seconds, processes, memory_mb, disk_mb, output_characters)
        self._defaults = self._limits
        self._task: HarborTask | None = None
        self._begun = 0.0

    async def reset(self, harbor: Mapping[str, Any], **task: Any) -> None:  # type: ignore[override]
        """Begin with the files that the task's image and its Dockerfile give. Raises OSError, ValueError."""
        self._task = found = HarborTask.from_json(harbor)
        self._limits = ProgramLimits(
            self._defaults.processes,
            found.memory_mb or self._defaults.memory_mb,
            found.storage_mb or self._defaults.disk_mb,
        )
        self.workspace = make_folder()
        await in_folder_thread(_stage, found, self.workspace)
        await self._allow(0)
        self._begun = monotonic()

    async def run(self, command: str, seconds: float) -> ProgramResult:
        """See Shell. The task's own time limit is for all commands together."""
        if self.task.agent_seconds is not None:
            seconds = min(seconds, self._begun + self.task.agent_seconds - monotonic())
            if seconds <= 0:
                return ProgramResult(124, "", "", f"the task's {self.task.agent_seconds:g} s are over")
        return await super().run(command, seconds)

    async def solve(self) -> ProgramResult:
        """Do what the task's solution does (the oracle)."""
        assert self.workspace is not None
        solution = self.workspace / "solution"
        await in_folder_thread(_fresh_copy, Path(self.task.folder, "solution"), solution)
        script = _script("/solution/solve.sh")
        env = {**self.environment(), **self.task.solution_env, "DEBIAN_FRONTEND": "noninteractive"}
        return await self._run(script, {"/solution": solution}, env, self.task.agent_seconds or self._seconds)

    async def reward(self) -> dict[str, float]:
        """Run the task's tests. Without a valid reward file the reward is 0 and the metric `no_reward` is 1."""
        assert self.workspace is not None
        tests, logs = self.workspace / "tests", self.workspace / "verifier"
        await in_folder_thread(_fresh_copy, Path(self.task.folder, "tests"), tests)
        await in_folder_thread(_fresh_copy, None, logs)
        # or packages in the agent's /root would be part of every Python that the tests call
        env = {**self.environment(), "PYTHONNOUSERSITE": "1", **self.task.verifier_env}
        script = _script("/tests/test.sh", "/logs/verifier/test-stdout.txt")
        places = {"/tests": tests, "/logs/verifier": logs}
        await self._allow(self._limits.disk_mb)  # an agent may have left no room for what its tests write
        result = await self._run(script, places, env, self.task.verifier_seconds)
        rewards = None if result.ended else await asyncio.to_thread(_rewards, logs)
        return {"reward": 0.0, "success": 0.0, "no_reward": 1.0} if rewards is None else rewards

    @property
    def task(self) -> HarborTask:
        """The chain's task."""
        assert self._task is not None
        return self._task

    def view(self) -> View:
        """See Shell."""
        assert self.workspace is not None
        folders = {place: self.workspace / str(number) for number, place in enumerate(self.task.writable)}
        return View(Path(self.task.root), (), folders, self.task.workdir, user=0)

    def environment(self) -> dict[str, str]:
        """See Shell."""
        return {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **self.task.env}

    async def _allow(self, disk_mb: int) -> None:
        """Let the chain's files grow by `disk_mb`, if the limit does not allow more."""
        assert self.workspace is not None
        use = await in_folder_thread(measure, [self.workspace])
        most = max(self._limits.disk_mb, -(-use.size >> 20) + disk_mb)
        self._limits = replace(self._limits, disk_mb=most)

    async def _run(
        self, script: str, places: Mapping[str, Path], env: Mapping[str, str], seconds: float
    ) -> ProgramResult:
        view = self.view()
        whole = View(view.root, view.readable, {**view.folders, **places}, view.start, view.user)
        return await run_program(["sh", "-c", script], whole, self._limits, env, seconds=seconds, merged=True)


def _script(path: str, output: str = "") -> str:
    """Return what makes a script executable and runs it, as Harbor does."""
    return f"chmod +x {path} && {path}" + (f" > {output} 2>&1" if output else "")


def _stage(task: HarborTask, folder: Path) -> None:
    """Fill the folders that the chain may change: what the root has there, then what the Dockerfile copies."""
    folders = {PurePosixPath(place): folder / str(number) for number, place in enumerate(task.writable)}
    for place, outside in folders.items():
        inner = Path(task.root, *place.parts[1:])
        # of this machine, nobody's files
        if inner.is_dir() and (task.root != "/" or place.parts[1] in ("usr", "etc")):
            shutil.copytree(inner, outside, symlinks=True, ignore=_unreadable)
        else:
            outside.mkdir()
    context = Path(task.folder, "environment")
    for copy in task.copies:
        _put(copy, context, folders)
    workdir = _outside(PurePosixPath(task.workdir), folders)
    workdir.mkdir(parents=True, exist_ok=True)
    give_to_sandbox(folder)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Return which entries of a folder of the root are left out: sockets and pipes, and what the sandbox's user may not
    read, such as /etc/shadow."""
    return [name for name in names if not _is_for_sandboxes(Path(folder, name))]


def _is_for_sandboxes(path: Path) -> bool:
    if path.is_symlink():
        return True
    if not (path.is_file() or path.is_dir()):
        return False
    # the copy will belong to that user
    return os.access(path, os.R_OK) if sandbox_user() is None else bool(path.stat().st_mode & stat.S_IROTH)


def _put(copy: Copy, context: Path, folders: Mapping[PurePosixPath, Path]) -> None:
    """Do a COPY: a folder's content, or files, into a folder, or a file to its name."""
    target = _outside(PurePosixPath(copy.target), folders)
    sources = [path for name in copy.sources for path in _matching(context, name)]
    into = copy.into or len(sources) > 1
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            made = target
        else:
            made = target / source.name if into or target.is_dir() else target
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, made, follow_symlinks=False)
        if copy.mode is not None:
            for path in [made, *made.rglob("*")] if made.is_dir() else [made]:
                path.chmod(copy.mode)


def _matching(context: Path, name: str) -> list[Path]:
    name = name.lstrip("/")
    return [context] if name in ("", ".", "./") else sorted(context.glob(name))


def _outside(place: PurePosixPath, folders: Mapping[PurePosixPath, Path]) -> Path:
    """Return where a place inside lies outside."""
    base = next(base for base in folders if place.is_relative_to(base))
    return folders[base] / place.relative_to(base)


def _fresh_copy(source: Path | None, target: Path) -> None:
    """Copy a folder (None: an empty one) for the sandbox."""
    if source is None:
        target.mkdir()
    else:
        shutil.copytree(source, target, symlinks=True)
    give_to_sandbox(target)


def _rewards(logs: Path) -> dict[str, float] | None:
    """Return the reward and further numbers of reward.json, or else of reward.txt; None if neither is valid."""
    for name, read in (("reward.json", _numbers), ("reward.txt", lambda text: {"reward": float(text)})):
        try:
            # the folder's files are the sandbox's: a link may lead anywhere
            descriptor = os.open(logs / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                found = read(file.read(_MOST_BYTES).decode())
            except (OSError, ValueError, TypeError, OverflowError, RecursionError):
                return None
        rewards = {**found, "success": float(found["reward"] >= 1.0)}
        try:
            EnvironmentReward.parse(rewards, name)
        except TypeError:  # the agent may have written it, and is not to get out of its reward by that
            return None
        return rewards
    return None


def _numbers(text: str) -> dict[str, float]:
    """Return the numbers of a JSON object by name, or of a JSON number as `reward`. The reward is the one of that name,
    or else the mean. Raises ValueError, TypeError."""
    given = json.loads(text)
    values = given if isinstance(given, dict) else {"reward": given}
    if not values or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError("it has other values than numbers")
    found = {str(name): float(value) for name, value in values.items()}
    return {"reward": sum(found.values()) / len(found), **found}
