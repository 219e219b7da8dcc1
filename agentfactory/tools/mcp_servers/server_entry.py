"""The other end of a connection: a recipe's MCP server entry resolved on this machine, with secrets filled in."""

import asyncio
import difflib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from agentfactory.base.config import CHAIN, Isolation, McpServerConfig
from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.user_code.import_path import own_python, user_folders
from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.environments.workspaces import ChainProgram, check_template
from agentfactory.tools.mcp_servers.own_server import build_server
from agentfactory.tools.prebuilt import prebuilt

_ANSWER_SECONDS = 20.0
_PASSED_ON = ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST", "XDG_RUNTIME_DIR")
"""Environment variables that configure docker's and podman's connection to their service."""


@dataclass(frozen=True)
class HttpAddress:
    """A running streamable-HTTP server. `session`: True if the connection must be a separate session."""

    url: str
    headers: dict[str, str]
    session: bool = False


@dataclass(frozen=True)
class Container:
    """An image whose program speaks MCP on stdin and stdout. `env` contains the values, including secrets."""

    server: str
    image: str
    args: list[str]
    env: dict[str, str]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StdioServerParameters]:
        """Yield the command of a new container, removed at exit; it has only names of variables, not values."""
        program = await find_program()
        name = f"agentfactory-{re.sub('[^a-zA-Z0-9_.-]', '-', self.server)}-{uuid.uuid4().hex[:12]}"
        variables = [part for key in self.env for part in ("--env", key)]
        args = ["run", "-i", "--rm", "--init", "--name", name, *variables, self.image, *self.args]
        env = {key: os.environ[key] for key in _PASSED_ON if key in os.environ} | self.env
        try:
            yield StdioServerParameters(command=program, args=args, env=env)
        finally:
            await _run(program, "rm", "--force", name)


Target = Server[Any] | MCPServer | StdioServerParameters | ChainProgram | Container | HttpAddress


def target_of(name: str, config: McpServerConfig, base: Path, result_bytes: int) -> Target:
    """Return the object, process, container or address that `config` names, with paths relative to `base`. `command:
    python` is this interpreter. Raises UserCodeError, TypeError, or SettingError like `check_entry`."""
    check_entry(name, config, base)
    if config.module is not None:
        loaded = load_object(config.module, base, prebuilt=prebuilt())
        return build_server([loaded], name, config.pool, config.options, result_bytes=result_bytes)
    if config.url is not None:
        headers = expand_variables(f"mcp_servers.{name}.headers", config.headers)
        return HttpAddress(config.url, headers, config.isolation is Isolation.SESSION)
    env = expand_variables(f"mcp_servers.{name}.env", config.env)
    if config.container is not None:
        return Container(name, config.container, config.args, env)
    assert config.command is not None
    cwd = Path(config.cwd) if config.cwd and config.cwd.startswith(CHAIN) else base / (config.cwd or ".")
    command, *args = program_of(config.command, config.args, base if CHAIN in str(cwd) else cwd)
    program = StdioServerParameters(command=command, args=args, env=env, cwd=cwd)
    if not config.has_folders:
        return program
    template = base / config.workspace if config.workspace else None
    return ChainProgram(program, template)


_UNSHARED = ("", ".py", ".js", ".mjs", ".cjs", ".ts", ".jar", ".log")
"""Endings of words, programs and logs, which chains do not see."""


def files_of_all(target: Target) -> list[Path]:
    """Return what may be files in a program's arguments and variables, and without `${chain}` belongs to all chains."""
    program = target.program if isinstance(target, ChainProgram) else target
    if not isinstance(program, StdioServerParameters):
        return []
    # also after `=`, and addresses such as sqlite:///notes.db
    texts = (re.split(r"=|\w+:///", given)[-1] for given in (*program.args, *(program.env or {}).values()))
    files = [Path(program.cwd or "", text) for text in texts]
    return [file for file in dict.fromkeys(files) if file.suffix not in _UNSHARED and CHAIN not in str(file)]


def check_entry(name: str, config: McpServerConfig, base: Path, prepared: Path | None = None) -> None:
    """Check an entry's variables and folders; paths below `prepared` need not exist. Raises SettingError."""
    prefix = f"mcp_servers.{name}"
    expand_variables(f"{prefix}.headers", config.headers)
    expand_variables(f"{prefix}.env", config.env)
    for field, text in (*((f"args.{n}", text) for n, text in enumerate(config.args)), ("cwd", config.cwd or "")):
        for variable in _VARIABLE.findall(text):
            is_close = difflib.get_close_matches(variable.lower(), ["chain"], cutoff=0.75)
            if f"${{{variable}}}" != CHAIN and variable not in os.environ and is_close:
                problem = f"got {short(text)}: ${{{variable}}} is unknown"
                raise SettingError(f"{prefix}.{field}", problem, f"did you mean {CHAIN}?")
    template = base / config.workspace if config.workspace else None
    if template is not None and prepared is not None and template.is_relative_to(prepared):
        return
    if template is not None:
        check_template(f"{prefix}.workspace", template)
    inside = (config.cwd or "").removeprefix(CHAIN).strip("/")
    if CHAIN in (config.cwd or "") and inside and not (template and (template / inside).is_dir()):
        has = f"{template} has no such folder" if template else "without `workspace` the chain's folder is empty"
        fix = f"make it there, or write {CHAIN}" if template else f"write {CHAIN}, or name a `workspace` that has it"
        raise SettingError(f"{prefix}.cwd", f"got {config.cwd!r}, but {has}", fix)


def program_of(command: str, args: list[str], cwd: Path) -> list[str]:
    """Return the command line of a program; `python` is this interpreter, with the user's import path."""
    if command != "python":
        return [command, *args]
    if args[:1] != ["-m"]:
        return [sys.executable, *args]
    folders = json.dumps([*dict.fromkeys([str(cwd), *user_folders()])])
    return own_python("-m", "agentfactory.base.user_code.run_module", folders, *args[1:])


_VARIABLE = re.compile(r"\$\{(\w+)\}")


def expand_variables(field: str, values: dict[str, str]) -> dict[str, str]:
    """Replace `${NAME}` with environment variables. Raises SettingError, below `field`, for one that is not set."""
    known = os.environ | {"chain": CHAIN}  # in env; headers cannot have it
    for key, value in values.items():
        for name in _VARIABLE.findall(value):
            if name not in known:
                raise SettingError(f"{field}.{key}", f"the environment variable {name} is not set", "export it")
    return {key: _VARIABLE.sub(lambda match: known[match[1]], value) for key, value in values.items()}


async def find_program() -> str:
    """Return the first of docker and podman that works. Raises ToolInfrastructureError with their messages."""
    if _works:
        return _works[0]
    reasons = []
    for program in ("docker", "podman"):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        status, said = await _run(program, "info")
        if status == 0:
            _works.append(program)
            return program
        reasons.append(f"`{program} info` failed: {said}")
    fix = "Install podman, start docker's daemon, or give the server's program by `command`"
    raise ToolInfrastructureError(f"no container can be run here: {'; '.join(reasons)}. {fix}")


_works: list[str] = []


async def _run(*command: str) -> tuple[int | None, str]:
    """Run a command to its end. Return its status (None: it took too long) and the last line of its stderr."""
    none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=none, stderr=pipe)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            _, said = await process.communicate()
    except TimeoutError:
        return None, f"no answer within {_ANSWER_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode(errors="replace").strip().splitlines()
    return process.returncode, lines[-1] if lines else "no message on stderr"
