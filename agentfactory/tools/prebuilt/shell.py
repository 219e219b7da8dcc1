"""`Shell`: an environment in which a model runs commands, in a sandbox with the chain's own folder."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentfactory.base.processes.sandbox_limits import ProgramLimits, check_range
from agentfactory.base.user_code.row_files import folder_of_files, load_files, write_files
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.environments.workspaces import give_to_sandbox, in_folder_thread, make_folder, remove_folder
from agentfactory.tools.sandbox.bubblewrap import WORKSPACE, View, check_readable
from agentfactory.tools.sandbox.program import ProgramResult, run_program
from agentfactory.tools.tool import tool

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Shell(Environment):
    """Shell commands in the chain's own folder. Files persist between commands; a command's processes end with it.

    It gives no reward: set `rewards:` in the recipe, or define `reward` in a subclass, which can read `self.workspace`.
    There is no network. The data row's `files` are copied into the folder: a mapping of name to text (or to
    `{"base64": ...}`), or a list of names below the folder of the option `files`.

    Args:
        seconds: time limit of a command.
        processes: maximum number of processes and threads at a time.
        memory_mb: memory of all processes together, in MiB.
        disk_mb: size of the folder's files and folders together, in MiB; each takes at least 4 KiB.
        output_characters: characters of a command's text for the model: its beginning and its end.
        files: folder with the files that rows name.
        root: root file system of the commands, read-only; `/` shows the machine's programs, libraries and /etc.
        readable: further files and folders of the machine that commands may read.

    Raises ValueError if an option is out of its range, or a folder does not exist."""

    sandboxed: ClassVar[bool] = True

    def __init__(
        self,
        seconds: float = 60.0,
        processes: int = 128,
        memory_mb: int = 1024,
        disk_mb: int = 256,
        output_characters: int = 10_000,
        files: str | None = None,
        root: str = "/",
        readable: Sequence[str] = (),
    ) -> None:
        if not 0 < seconds <= 86400:
            raise ValueError(f"seconds: got {seconds}; it has to be above 0, and a day at most")
        check_range("output_characters", output_characters, 200, 100_000)
        self._limits = ProgramLimits(processes, memory_mb, disk_mb)
        self._seconds, self._characters = seconds, output_characters
        self._files = folder_of_files(files)
        self._root = Path(root).resolve()
        self._readable = tuple(Path(path).resolve() for path in readable)
        check_readable("readable", self._readable)
        if not os.path.lexists(self._root / "bin/sh"):
            raise ValueError(f"root: {self._root} has no /bin/sh; name a folder with a root file system, or /")
        self.workspace: Path | None = None
        """The chain's folder, outside the sandbox. Its content is untrusted, such as links out of it."""

    async def reset(self, files: Mapping[str, Any] | Sequence[str] | None = None, **task: Any) -> None:
        """Begin with the row's `files` in the workspace. Raises ValueError if one does not exist, or does not fit."""
        self.workspace = await in_folder_thread(_filled, load_files(files, self._files, self._limits.disk_mb))

    @tool
    async def shell(self, command: str) -> dict[str, Any]:
        """Run a shell command. Files are kept from call to call; each call begins in the same folder, and processes
        that it leaves behind are ended. Returns what it prints.

        Args:
            command: The command, of one line or more.
        """
        result = await self.run(command, self._seconds)
        notes = []
        if result.ended is not None:
            notes.append(f"[The command was ended: {result.ended}.]")
        elif result.status != 0:
            notes.append(f"[exit status {result.status}]")
        text = "\n".join(part for part in (result.stdout.rstrip("\n"), *notes) if part) or "(no output)"
        return {"observation": text, "exit_status": result.status}

    async def run(self, command: str, seconds: float) -> ProgramResult:
        has_bash = any(os.path.lexists(self.view().root / place) for place in ("bin/bash", "usr/bin/bash"))
        shell = "bash" if has_bash else "sh"
        limits: dict[str, Any] = {"seconds": seconds, "characters": self._characters, "merged": True}
        return await run_program([shell, "-c", command], self.view(), self._limits, self.environment(), **limits)

    def view(self) -> View:
        assert self.workspace is not None
        return View(self._root, self._readable, {WORKSPACE: self.workspace}, WORKSPACE)

    def environment(self) -> dict[str, str]:
        return {"PATH": PATH, "HOME": WORKSPACE, "LANG": "C.UTF-8", "TERM": "dumb"}

    async def release(self) -> None:
        if self.workspace is not None:
            await in_folder_thread(remove_folder, self.workspace)
            self.workspace = None

    async def close(self) -> None:
        await self.release()


def _filled(contents: Mapping[str, bytes]) -> Path:
    folder = make_folder()
    write_files(contents, folder)
    give_to_sandbox(folder)
    return folder
