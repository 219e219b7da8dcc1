"""`Harbor`: a shell on the files of a Harbor task, with the task's tests as the reward."""

import asyncio
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

from agentfactory.base.files.untrusted_files import TreeCopy, entries_of, opened_folder, read_file
from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.processes.sandbox_limits import ProgramLimits, sandbox_user
from agentfactory.tools.environments.workspaces import give_to_sandbox, in_folder_thread, make_folder
from agentfactory.tools.prebuilt.shell import PATH, Shell
from agentfactory.tools.sandbox.bubblewrap import View, is_shown, place_in
from agentfactory.tools.sandbox.disk_use import measure
from agentfactory.tools.sandbox.program import ProgramResult, run_program
from agentfactory.worlds.harbor.dockerfile import Copy
from agentfactory.worlds.harbor.harbor_task import HarborTask, expanded, masked, matching

_MOST_BYTES = 1 << 20


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
        for texts in (found.environment_env, found.verifier_env, found.solution_env):
            expanded(texts)  # raises, if one is not set here
        self.workspace = make_folder()
        await in_folder_thread(_stage, found, self.workspace, self._room())
        await self._allow(0)
        self._begun = monotonic()

    async def run(self, command: str, seconds: float) -> ProgramResult:
        """The task's own time limit applies to all commands together."""
        if self.task.agent_seconds is not None:
            seconds = min(seconds, self._begun + self.task.agent_seconds - monotonic())
            if seconds <= 0:
                return ProgramResult(124, "", "", f"the task's {self.task.agent_seconds:g} s are over")
        return self._masked(await super().run(command, seconds))

    async def solve(self) -> ProgramResult:
        assert self.workspace is not None
        solution = self.workspace / "solution"
        await in_folder_thread(_fresh, solution, Path(self.task.folder, "solution"), self._room())
        script = _script("/solution/solve.sh")
        env = {**self._variables(self.task.solution_env), "DEBIAN_FRONTEND": "noninteractive"}
        return await self._run(script, {"/solution": solution}, env, self.task.agent_seconds or self._seconds)

    async def reward(self) -> dict[str, float]:
        """Run the task's tests. Without a valid reward file the reward is 0 and the metric `no_reward` is 1."""
        assert self.workspace is not None
        tests, logs = self.workspace / "tests", self.workspace / "verifier"
        await in_folder_thread(_fresh, tests, Path(self.task.folder, "tests"), self._room())
        await in_folder_thread(_fresh, logs)
        # no user site: the tests' Python must not import packages from the agent's /root
        env = self._variables({"PYTHONNOUSERSITE": "1", **self.task.verifier_env})
        script = _script("/tests/test.sh", "/logs/verifier/test-stdout.txt")
        places = {"/tests": tests, "/logs/verifier": logs}
        await self._allow(self._limits.disk_mb)  # the agent may have left no room for the tests' output
        result = await self._run(script, places, env, self.task.verifier_seconds)
        rewards = None if result.ended else await asyncio.to_thread(_rewards, logs)
        return {"reward": 0.0, "success": 0.0, "no_reward": 1.0} if rewards is None else rewards

    @property
    def task(self) -> HarborTask:
        assert self._task is not None
        return self._task

    def view(self) -> View:
        assert self.workspace is not None
        folders = {place: self.workspace / str(number) for number, place in enumerate(self.task.writable)}
        return View(Path(self.task.root), (), folders, self.task.workdir, user=0)

    def environment(self) -> dict[str, str]:
        return self._variables({})

    def _variables(self, further: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process: those of all commands, and further ones of task.toml."""
        own = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **self.task.env}
        return {**own, **expanded({**self.task.environment_env, **further})}

    def _masked(self, result: ProgramResult) -> ProgramResult:
        return replace(result, stdout=masked(result.stdout))

    def _room(self) -> int:
        return min(self._limits.disk_mb << 20, shutil.disk_usage(tempfile.gettempdir()).free // 2)

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
        done = await run_program(["sh", "-c", script], whole, self._limits, env, seconds=seconds, merged=True)
        return self._masked(done)


def _script(path: str, output: str = "") -> str:
    return f"chmod +x {path} && {path}" + (f" > {output} 2>&1" if output else "")


def _stage(task: HarborTask, folder: Path, room: int) -> None:
    """Fill the folders that the chain may change from the root file system, then by the Dockerfile's COPY."""
    root = Path(task.root)
    image, files = TreeCopy(root, left_out=_is_hidden), TreeCopy(Path(task.folder), room)
    folders = {PurePosixPath(place): folder / str(number) for number, place in enumerate(task.writable)}
    for place, outside in folders.items():
        outside.mkdir()
        inner = root.joinpath(*place.parts[1:])
        # from this machine's own root, only system folders: no user's files
        is_public = root != Path("/") or is_shown(root, place.parts[1])
        if is_public and inner.is_dir() and place_in(root, str(place)) == str(place):
            with opened_folder(outside, folder) as into:
                image.folder(inner, into)
    for copy in task.copies:
        _put(copy, files, Path(task.folder), *_outside(copy.target, folders))
    workdir, base = _outside(task.workdir, folders)
    with opened_folder(workdir, base, make=True):
        pass
    give_to_sandbox(folder)


def _is_hidden(status: os.stat_result) -> bool:
    """Return whether to leave out an entry of a root file system: sockets, pipes, and files that the sandbox's user,
    who will own the copy, must not read, such as /etc/shadow."""
    if stat.S_ISLNK(status.st_mode):
        return False
    is_public = sandbox_user() is None or status.st_mode & stat.S_IROTH
    return not (is_public and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)))


def _put(copy: Copy, files: TreeCopy, task: Path, target: Path, base: Path) -> None:
    sources = {path: kind for source in copy.sources for path, kind in matching(task, source).items()}
    is_folder = target == base or entries_of(target.parent, base).get(target.name) == stat.S_IFDIR
    into = copy.into or is_folder or len(sources) > 1
    for path, kind in sources.items():
        is_file = kind == stat.S_IFREG
        with opened_folder(target.parent if is_file and not into else target, base, make=True) as made:
            if is_file:
                files.file(path, made, path.name if into else target.name, copy.mode)
            else:
                files.folder(path, made, copy.mode)


def _outside(place: str, folders: Mapping[PurePosixPath, Path]) -> tuple[Path, Path]:
    """Map a path inside the sandbox to the path outside, and the folder that it must not leave."""
    inside = PurePosixPath(place)
    base = next(base for base in folders if inside.is_relative_to(base))
    return folders[base] / inside.relative_to(base), folders[base]


def _fresh(folder: Path, source: Path | None = None, room: int = 0) -> None:
    """Create a folder for the sandbox, with the content of a task's folder `source`."""
    folder.mkdir()
    if source is not None:
        with opened_folder(folder, folder) as into:
            TreeCopy(source.parent, room).folder(source, into)
    give_to_sandbox(folder)


def _rewards(logs: Path) -> dict[str, float] | None:
    """Return the reward and further numbers of reward.json, or else of reward.txt; None if neither is valid."""
    for name, read in (("reward.json", _numbers), ("reward.txt", lambda text: {"reward": float(text)})):
        try:
            found = read(masked(read_file(logs / name, _MOST_BYTES, logs).decode()))
        except FileNotFoundError:
            continue
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
    given = json.loads(text)
    values = given if isinstance(given, dict) else {"reward": given}
    if not values or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError("it has other values than numbers")
    found = {str(name): float(value) for name, value in values.items()}
    return {"reward": sum(found.values()) / len(found), **found}
