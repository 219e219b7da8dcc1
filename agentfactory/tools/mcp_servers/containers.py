"""MCP servers in containers: the docker or podman command line, and the container's removal."""

import asyncio
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mcp import StdioServerParameters

from agentfactory.base.messages import ToolInfrastructureError

PROGRAMS = ("docker", "podman")
"""Programs that can run a container, in the order in which they are tried."""
_ANSWER_SECONDS = 20.0
_PASSED_ON = ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST", "XDG_RUNTIME_DIR")
"""Environment variables that configure docker's and podman's connection to their service."""


@dataclass(frozen=True)
class Container:
    """An image whose program speaks MCP on stdin and stdout. `env` contains the values, including secrets."""

    server: str
    image: str
    args: list[str]
    env: dict[str, str]

    def command(self, program: str, name: str) -> StdioServerParameters:
        """Return the command by which `program` runs the image under `name`. The command line has only the names of
        variables, not their values."""
        variables = [part for key in self.env for part in ("--env", key)]
        return StdioServerParameters(
            command=program,
            args=["run", "-i", "--rm", "--init", "--name", name, *variables, self.image, *self.args],
            env={key: os.environ[key] for key in _PASSED_ON if key in os.environ} | self.env,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StdioServerParameters]:
        """Yield the command of a new container, which is removed when the context exits."""
        program = await find_program()
        name = f"agentfactory-{re.sub('[^a-zA-Z0-9_.-]', '-', self.server)}-{uuid.uuid4().hex[:12]}"
        try:
            yield self.command(program, name)
        finally:
            await _run(program, "rm", "--force", name)


async def find_program() -> str:
    """Return the first of docker and podman that works here.

    Raises ToolInfrastructureError with the message of each if neither works.
    """
    if _works:
        return _works[0]
    reasons = []
    for program in PROGRAMS:
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        status, said = await _run(program, "info")
        if status == 0:
            _works.append(program)
            return program
        reasons.append(f"`{program} info` failed: {said}")
    raise ToolInfrastructureError(
        f"no container can be run here: {'; '.join(reasons)}. Install podman, start docker's daemon, or give the "
        "server's program by `command`"
    )


_works: list[str] = []


async def _run(*command: str) -> tuple[int | None, str]:
    """Run a command to its end. Return its status (None: it took too long) and the last line of its stderr."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
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
