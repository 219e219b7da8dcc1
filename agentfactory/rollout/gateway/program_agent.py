"""Programs as agents: a process per chain, in its own folder, which gets the model's address from its environment."""

import asyncio
import difflib
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from mcp import StdioServerParameters
from mcp.client.stdio import get_default_environment

from agentfactory.base.errors import SettingError, short
from agentfactory.base.http.proxies import spare_loopback
from agentfactory.base.processes import end_with_parent as keeper
from agentfactory.base.processes.sandbox_limits import ProgramLimits, SandboxKind, SandboxUnavailable, sandbox_user
from agentfactory.base.user_code.row_files import folder_of_files, load_files, names_of, write_files
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.rollout.config import AgentConfig, ProgramOptions
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ClientAgent, Visit
from agentfactory.rollout.text.parsers.values import write_value
from agentfactory.tools.environments.workspaces import (
    ChainProgram,
    check_template,
    give_to_sandbox,
    in_folder_thread,
)
from agentfactory.tools.mcp_servers.server_entry import expand_variables, program_of
from agentfactory.tools.sandbox.bubblewrap import WORKSPACE, View, check_readable, find_bwrap
from agentfactory.tools.sandbox.program import run_program, waited_for

_FIELD = re.compile(r"\$\{task\.(\w+)\}")
_BARE = re.compile(r"\$\{(\w+)\}")
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts")
_INTERPRETER = re.compile(r"(python|pypy|node|deno|bun|tsx|ts-node|sh|bash|dash|zsh|uv)[\d.]*")
"""Name of a program whose first argument with one of these suffixes is the script that it runs."""
_INLINE = ("-c", "-m")
"""Options of interpreters that run code or a module instead of a script."""
_KEPT = 65536
"""Size of the part of a program's output that is kept: its start and end in the sandbox, otherwise its end."""
_CHUNK = 8192
_CHECK_SECONDS = 5.0
"""Longest time to check the files of rows before the run; an unchecked row fails in its chain."""
_IN_FOLDER = StdioServerParameters(command="", args=["${chain}"])
"""A program whose argument is the chain's folder."""


class ProgramAgent(ClientAgent):
    """A program that is started once per chain, with the gateway's address in its environment. Its folder is deleted,
    and all its processes are ended, once the chain has been scored."""

    address_fix = (
        "let its client take its address and key from the variables OPENAI_BASE_URL and OPENAI_API_KEY (or "
        "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY), and remove addresses from its code and settings"
    )

    def __init__(self, config: AgentConfig, base: Path) -> None:
        command, options = config.command, config.options
        assert isinstance(options, ProgramOptions)
        for number, part in enumerate(command):
            # check only the program and scripts: other paths may be outputs of the program
            is_checked = part.endswith(_SCRIPTS) or (number == 0 and not _FIELD.search(part))
            if os.path.isabs(part) and is_checked and not os.path.isfile(part):
                fix = f"name an existing {'script' if number else 'program'}"
                raise SettingError(f"rollout.agent.command.{number}", f"{part}: no such file", fix)
        self._command = program_of(command[0], command[1:], base)
        self._env = expand_variables("rollout.agent.options.env", options.env)
        self._texts = {f"rollout.agent.command.{number}": part for number, part in enumerate(command)}
        self._texts |= {f"rollout.agent.options.env.{name}": value for name, value in self._env.items()}
        for name in ("workspace", "files"):
            if _FIELD.search(text := getattr(options, name) or ""):
                problem = f"got {short(text)}, but fields of the row are not replaced there"
                raise SettingError(f"rollout.agent.options.{name}", problem, "give files by task as the row's `files`")
        self._template = Path(options.workspace) if options.workspace else None
        self._sandboxed = options.sandbox is SandboxKind.BUBBLEWRAP
        self._limits = ProgramLimits(options.processes, options.memory_mb, options.disk_mb)
        self._readable: tuple[Path, ...] = ()
        try:
            self._files = folder_of_files(options.files)
        except ValueError as error:
            problem = str(error).removeprefix("files: ")
            raise SettingError("rollout.agent.options.files", problem, "name an existing folder") from None
        if self._template is not None:
            size = check_template("rollout.agent.options.workspace", self._template) >> 20
            if self._sandboxed and size > options.disk_mb:
                problem = f"{self._template} has {size} MiB, and a sandboxed chain may have {options.disk_mb}"
                raise SettingError("rollout.agent.options.workspace", problem, "make it smaller")
        if "/" in (program := command[0]) and _is_in_folder(program):
            if (path := self._in_template(program)) is None:
                raise self._missing(0, program)
            if not os.access(path, os.X_OK):
                raise SettingError("rollout.agent.command.0", f"{program} is not executable", f"chmod +x {path}")
        # a script that is not in the template must be in the files of every row
        script = _script_of(command)
        self._script = None if script is None or self._in_template(command[script]) else (script, command[script])
        if self._sandboxed:
            further = [Path(path) for path in options.readable]
            check_readable("rollout.agent.options.readable", further)
            named = _named(self._command)
            check_readable("rollout.agent.command", named)
            self._readable = tuple(dict.fromkeys((*named, *further)))

    async def __aenter__(self) -> Self:
        if self._sandboxed:
            try:
                await asyncio.to_thread(find_bwrap, sandbox_user())
            except SandboxUnavailable as error:
                raise SettingError("rollout.agent.options.sandbox", error.problem, error.fix) from None
        return self

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        until = time.monotonic() + _CHECK_SECONDS
        for number, task in enumerate(tasks, 1):
            if time.monotonic() > until:
                break
            try:
                self._contents(task)
            except ValueError as error:
                problem, _, fix = str(error).rpartition("; ")
                raise SettingError(f"{section}, row {number}", problem, fix) from None
        if with_files := [number for number, task in enumerate(tasks, 1) if "files" in task]:
            for number, task in enumerate(tasks, 1):
                if "files" not in task:
                    problem = f"files: missing, but row {with_files[0]} has them"
                    raise SettingError(f"{section}, row {number}", problem, 'write "files": {} if it needs none')
        if self._script is not None:
            for number, task in enumerate(tasks, 1):
                if Path(_inside(self._script[1])) not in map(Path, names_of(task.get("files"))):
                    raise self._missing(*self._script, f" for row {number} of {section}" if with_files else "")
        for field, text in self._texts.items():
            for number, task in enumerate(tasks, 1):
                for name in _FIELD.findall(text):
                    if name == "question" and not str(task.get(name, "?")).strip():
                        problem = f"question: empty, but {field} passes it to the program"
                        raise SettingError(f"{section}, row {number}", problem, "write the task, or leave the row out")
                    if name not in task:
                        close = difflib.get_close_matches(name, task, 1)
                        problem = f"got {short(text)}, but row {number} of {section} has no {name}, only "
                        fix = f"give every row this field, or rename one by {section}.columns"
                        fix = f"write ${{task.{close[0]}}}" if close else fix
                        raise SettingError(field, f"{problem}{', '.join(task)}", fix)
                if bare := [name for name in _BARE.findall(text) if name in task]:
                    problem = f"got {short(text)}, but ${{{bare[0]}}} is not replaced"
                    raise SettingError(field, problem, f"write ${{task.{bare[0]}}}")

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        async with ChainProgram(_IN_FOLDER, self._template).running() as made:
            folder = Path(made.args[0])
            if self._sandboxed:
                await in_folder_thread(give_to_sandbox, folder)
            yield folder

    @asynccontextmanager
    async def first_folder(self, task: Task) -> AsyncIterator[Path]:
        """Create a folder with which a chain on `task` begins, for a try of the rewards; remove it on exit."""
        async with ChainProgram(_IN_FOLDER, self._template).running() as made:
            folder = Path(made.args[0])
            try:
                await in_folder_thread(self._add_files, task, folder)
            except ValueError as error:
                problem, _, fix = str(error).rpartition("; ")
                raise SettingError("data", problem, fix) from None
            yield folder

    async def run(self, visit: Visit) -> str | None:
        assert visit.workspace is not None
        try:
            await in_folder_thread(self._add_files, visit.task, visit.workspace)
        except (ValueError, OSError) as error:
            raise AgentFailed(f"the row's files cannot be written: {error}", None) from None
        # inside the sandbox, paths do not reveal the machine
        folder = WORKSPACE if self._sandboxed else str(visit.workspace)
        command = [self._filled(part, visit.task, folder) for part in self._command]
        env = {
            **get_default_environment(),
            "HOME": folder,
            **visit.endpoint.environment(),
            **{key: self._filled(value, visit.task, folder) for key, value in self._env.items()},
        }
        spare_loopback(env)
        ended = None
        if self._sandboxed:
            view = View(readable=self._readable, folders={WORKSPACE: visit.workspace}, start=WORKSPACE)
            port = urlsplit(visit.endpoint.url).port
            result = await run_program(
                command, view, self._limits, env, characters=_KEPT, port=port, listening=visit.listening
            )
            status, output, errors, ended = result.status, result.stdout.strip(), result.stderr, result.ended
        else:
            status, output, errors = await _keep(command, visit.workspace, env)
        if status != 0:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            last = f": {lines[-1][:500]}" if lines else ""
            problem = f"was ended: {ended}" if ended else f"ended with exit status {status}{last}"
            raise AgentFailed(f"{Path(self._command[0]).name} {problem}", output or None)
        return output or None

    def _in_template(self, part: str) -> Path | None:
        path = None if self._template is None else self._template / _inside(part)
        return path if path is not None and path.is_file() else None

    def _missing(self, number: int, part: str, row: str = "") -> SettingError:
        begins = "empty" if self._template is None else f"as a copy of {self._template}"
        problem = f"{part}: no such file in the chain's folder{row}, which begins {begins}"
        fix = f"write ${{here}}/{_inside(part)} for a file beside the recipe, or put it into options.workspace"
        return SettingError(f"rollout.agent.command.{number}", problem, fix)

    def _contents(self, task: Task) -> dict[str, bytes]:
        return load_files(task.get("files"), self._files, self._limits.disk_mb)

    def _add_files(self, task: Task, folder: Path) -> None:
        if contents := self._contents(task):
            write_files(contents, folder)
            if self._sandboxed:
                give_to_sandbox(folder)

    def _filled(self, text: str, task: Task, workspace: str) -> str:
        return _FIELD.sub(lambda match: write_value(task[match[1]]), text.replace("${chain}", workspace))


def _inside(part: str) -> str:
    return os.path.normpath(part.removeprefix("${chain}/"))


def _is_in_folder(part: str) -> bool:
    return "${" not in (path := part.removeprefix("${chain}/")) and not os.path.isabs(path)


def _script_of(command: list[str]) -> int | None:
    """Return the number of the script in the chain's folder that an interpreter runs; None if the command has none."""
    for number, part in enumerate(command):
        before = command[:number]
        if part in _INLINE or (part == "-e" and before and Path(before[-1]).name in ("node", "bun")):
            return None
        if part.endswith(_SCRIPTS) and any(_INTERPRETER.fullmatch(Path(name).name) for name in before):
            return number if _is_in_folder(part) else None
    return None


def _named(command: list[str]) -> list[Path]:
    """Return the files and folders in a command, each replaced by its installation: the virtual environment of a Python
    or script, with its base, or the `node_modules` of an npm program."""
    parts = [shutil.which(command[0]) or command[0], *command[1:]]
    found: list[Path] = []
    for path in (Path(part) for part in parts if os.path.isabs(part) and os.path.exists(part)):
        environment = path.parent.parent
        if (environment / "pyvenv.cfg").is_file():
            found += [environment, Path(os.path.realpath(environment / "bin" / "python")).parents[1]]
        elif environment != Path("/") and any(environment.glob("lib/python3*/os.py")):
            # a separate Python, such as conda's; not "/", whose lib may belong to the system's Python
            found.append(environment)
        elif "node_modules" in path.parts:
            found.append(Path(*path.parts[: path.parts.index("node_modules") + 1]))
        else:
            found.append(path)
    return found


async def _keep(command: list[str], folder: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """Run a program without a sandbox, then end all its processes. Return status and ends of stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-I", "-S", keeper.__file__, *command],
        cwd=folder,
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = await asyncio.gather(_tail(process.stdout), _tail(process.stderr))
        return await process.wait(), output, errors
    finally:
        # the keeper ends all processes and then itself; the caller must wait for that
        assert process.stdin is not None
        process.stdin.close()
        await waited_for(process.wait())


async def _tail(stream: asyncio.StreamReader) -> str:
    chunks: deque[bytes] = deque(maxlen=_KEPT // _CHUNK)
    while chunk := await stream.read(_CHUNK):
        chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace").strip()
