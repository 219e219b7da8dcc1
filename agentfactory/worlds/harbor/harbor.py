"""`Harbor`: a shell on the files of a Harbor task, with the task's tests as the reward."""

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
"""Maximum bytes read of a reward file."""


class Harbor(Shell):
    """An environment with the tool `shell` for tasks of `data.harbor`. The task's tests give the reward.

    Tests run in a separate sandbox after the agent's processes have ended. They get the files that the agent left, and
    fresh copies of `/tests` and `/logs/verifier` that no process of the agent could access.

    Args:
        seconds: time limit of a command.
        processes: maximum concurrent processes and threads.
        memory_mb: memory of all processes together in MiB, unless the task sets it.
        disk_mb: size of a chain's changeable files in MiB, unless the task sets it.
        output_characters: characters of a command's output that the model gets: its beginning and its end.
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
        """Begin with the files of the task's image and its Dockerfile. Raises OSError, ValueError."""
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
        """See Shell. The task's own time limit applies to all commands together."""
        if self.task.agent_seconds is not None:
            seconds = min(seconds, self._begun + self.task.agent_seconds - monotonic())
            if seconds <= 0:
                return ProgramResult(124, "", "", f"the task's {self.task.agent_seconds:g} s are over")
        return await super().run(command, seconds)

    async def solve(self) -> ProgramResult:
        """Run the task's solution (the oracle)."""
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
        # no user site: the tests' Python must not import packages from the agent's /root
        env = {**self.environment(), "PYTHONNOUSERSITE": "1", **self.task.verifier_env}
        script = _script("/tests/test.sh", "/logs/verifier/test-stdout.txt")
        places = {"/tests": tests, "/logs/verifier": logs}
        await self._allow(self._limits.disk_mb)  # the agent may have left no room for the tests' output
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
        """Raise the disk limit if necessary, so that the chain's files can grow by `disk_mb`."""
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
    """Return a shell command that makes a script executable and runs it, as Harbor does."""
    return f"chmod +x {path} && {path}" + (f" > {output} 2>&1" if output else "")


def _stage(task: HarborTask, folder: Path) -> None:
    """Fill the folders that the chain may change from the root file system, then by the Dockerfile's COPY."""
    folders = {PurePosixPath(place): folder / str(number) for number, place in enumerate(task.writable)}
    for place, outside in folders.items():
        inner = Path(task.root, *place.parts[1:])
        # from this machine's own root, only system folders: no user's files
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
    """Return the entries of a root folder to leave out: sockets, pipes, and files that the sandbox's user must not
    read, such as /etc/shadow."""
    return [name for name in names if not _is_for_sandboxes(Path(folder, name))]


def _is_for_sandboxes(path: Path) -> bool:
    if path.is_symlink():
        return True
    if not (path.is_file() or path.is_dir()):
        return False
    # the sandbox's user will own the copy
    return os.access(path, os.R_OK) if sandbox_user() is None else bool(path.stat().st_mode & stat.S_IROTH)


def _put(copy: Copy, context: Path, folders: Mapping[PurePosixPath, Path]) -> None:
    """Execute a COPY: a folder's contents or files into a folder, or one file to a new name."""
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
    """Map a path inside the sandbox to the path outside."""
    base = next(base for base in folders if place.is_relative_to(base))
    return folders[base] / place.relative_to(base)


def _fresh_copy(source: Path | None, target: Path) -> None:
    """Copy a folder for the sandbox; None: create an empty one."""
    if source is None:
        target.mkdir()
    else:
        shutil.copytree(source, target, symlinks=True)
    give_to_sandbox(target)


def _rewards(logs: Path) -> dict[str, float] | None:
    """Return the reward and further numbers of reward.json, or else of reward.txt; None if neither is valid."""
    for name, read in (("reward.json", _numbers), ("reward.txt", lambda text: {"reward": float(text)})):
        try:
            # the sandbox controls these files: a link could point anywhere
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
        except TypeError:  # the agent may have written the file, and must not escape its reward by an invalid one
            return None
        return rewards
    return None


def _numbers(text: str) -> dict[str, float]:
    """Return a JSON object's numbers by name, or a JSON number as `reward`. An object without `reward` gets the mean of
    its numbers as reward. Raises ValueError, TypeError."""
    given = json.loads(text)
    values = given if isinstance(given, dict) else {"reward": given}
    if not values or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError("it has other values than numbers")
    found = {str(name): float(value) for name, value in values.items()}
    return {"reward": sum(found.values()) / len(found), **found}
