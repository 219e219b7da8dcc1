"""`CodeInterpreter`: an environment in which a model runs Python, cell by cell, in a sandbox per chain."""

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from agentfactory.base.processes.sandbox_limits import SandboxKind, SandboxSettings, check_range
from agentfactory.base.user_code.row_files import folder_of_files, load_files
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.sandbox.process import SandboxProcess
from agentfactory.tools.sandbox.session import Sandbox, SandboxLost
from agentfactory.tools.tool import tool


@dataclass(frozen=True)
class Cell:
    """A cell's text for the model, its exception's name, and new or changed files of `artefacts` (None: too large)."""

    text: str
    error: str | None
    files: dict[str, bytes | None]


class CodeInterpreter(Environment):
    """Stateful Python: variables, imports and files persist between calls, until the chain's end.

    It gives no reward: set `rewards:` in the recipe. Each chain gets a fresh process and workspace, with a copy of the
    data row's `files`: a mapping of name to text (or to `{"base64": ...}`), or a list of names below the folder of the
    option `files`.

    Args:
        sandbox: `bubblewrap`, or `none`: limits only, for code that may do everything that this process may.
        seconds: time limit of a cell. Then Python code is interrupted, and variables are kept; code that cannot be
            interrupted is killed half a second later, and variables are lost.
        memory_mb: address space of the process, in MiB.
        disk_mb: size of the workspace, in MiB of memory.
        output_characters: characters of a cell's text for the model: its beginning and its end.
        packages: installed distributions that the code can import, with their dependencies.
        files: folder with the files that rows name.
        artefacts: patterns (`*.csv`) of workspace files that are put into the result's info (`artefacts`: name -> text
            or `{"base64": ...}`) after each cell that changed them; for rewards and users. A file that is too large
            is null.
        artefact_mb: maximum total size of a cell's artefacts, in MiB.

    Raises:
        ValueError: an option is out of its range, or a package is not installed.
        SandboxUnavailable: there is no bubblewrap, or no Python for sandboxes.
    """

    sandboxed: ClassVar[bool] = True

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        seconds: float = 10.0,
        memory_mb: int = 512,
        disk_mb: int = 64,
        output_characters: int = 10_000,
        packages: Sequence[str] = (),
        files: str | None = None,
        artefacts: Sequence[str] = (),
        artefact_mb: int = 1,
    ) -> None:
        if sandbox not in tuple(SandboxKind):
            raise ValueError(f"sandbox: got {sandbox!r}; it is one of {', '.join(SandboxKind)}")
        if not 0 < seconds <= 3600:
            raise ValueError(f"seconds: got {seconds}; it has to be above 0, and an hour at most")
        self._settings = SandboxSettings(SandboxKind(sandbox), memory_mb, disk_mb, output_characters, tuple(packages))
        self._seconds = seconds
        self._folder = folder_of_files(files)
        check_range("artefact_mb", artefact_mb, 1, 1024)
        self._patterns = tuple(artefacts)
        self._artefact_bytes = artefact_mb << 20
        self._contents: dict[str, bytes] = {}
        self._starting: Future[SandboxProcess] | None = Sandbox.begin(self._settings)
        self._starting.result()  # takes some milliseconds, and raises if something is not installed
        self._sandbox: Sandbox | None = None
        self._used = False

    async def reset(self, files: Mapping[str, Any] | Sequence[str] | None = None, **task: Any) -> None:
        """Begin with the row's `files` in the workspace. Raises SandboxUnavailable if this machine cannot run a
        sandbox, ValueError if a file does not exist, or does not fit into the workspace."""
        if self._used:
            self._renew()
        self._contents = load_files(files, self._folder, self._settings.disk_mb)
        if self._contents:
            await self._current()

    @tool
    async def python(self, code: str) -> dict[str, Any] | str:
        """Run Python code. Variables are kept from call to call. Returns what it prints and the value of its last line.

        Args:
            code: The code, of one line or more.
        """
        cell = await self.run(code)
        artefacts = {name: None if content is None else _encode(content) for name, content in cell.files.items()}
        info = {key: value for key, value in {"error": cell.error, "artefacts": artefacts}.items() if value}
        return {"observation": cell.text, **info} if info else cell.text

    async def run(self, code: str, files: Mapping[str, bytes] | None = None) -> Cell:
        """Run a cell, after adding `files` to the workspace. Raises ValueError if one does not fit."""
        notes = []
        if self._sandbox is not None and self._sandbox.lost:  # its last call was cancelled
            notes.append(_restarted("the last call took too long"))
            self._renew()
        sandbox = await self._current()
        for name, content in (files or {}).items():
            await sandbox.write(name, content)
        result = await sandbox.run(code, self._seconds)
        found: dict[str, bytes | None] = {}
        if result.lost is not None:
            notes.append(_restarted(result.lost))
            self._renew()
        elif self._patterns:
            try:
                found = await sandbox.read(self._patterns, self._artefact_bytes)
            except SandboxLost as loss:
                sandbox.close(str(loss))
        text = "\n".join(part for part in (result.text, *notes) if part) or "(no output)"
        return Cell(text, result.error, found)

    @property
    def empty(self) -> bool:
        """True if the next cell begins in a new process and workspace."""
        return self._sandbox is None or self._sandbox.lost

    async def release(self) -> None:
        """End the chain's process and workspace, and start the next process in the background."""
        self._contents = {}
        if self._used:
            self._renew()

    async def healthy(self) -> bool:
        return self._starting is None or not self._starting.done() or self._starting.exception() is None

    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
        if self._starting is not None:
            Sandbox.discard(self._starting)
        self._sandbox = self._starting = None

    def _renew(self) -> None:
        self._end()
        self._used = False
        self._starting = Sandbox.begin(self._settings)

    async def _current(self) -> Sandbox:
        if self._sandbox is None:
            starting = self._starting or Sandbox.begin(self._settings)
            self._starting = None
            self._used = True
            self._sandbox = await Sandbox.ready(self._settings, starting, self._contents)
        return self._sandbox


def _restarted(reason: str) -> str:
    return f"[The interpreter was restarted: {reason}. Variables and files made so far are lost.]"


def _encode(content: bytes) -> Any:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
