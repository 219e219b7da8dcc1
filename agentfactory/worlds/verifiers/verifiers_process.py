"""`VerifiersProcess`: a process of the user's verifiers, which plays many chains concurrently."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import spare_loopback
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import end_with_parent as keeper
from agentfactory.base.processes import environment
from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.worlds.verifiers import bridge

LOAD_SECONDS = 600.0
CANCEL_SECONDS = 10.0
"""Time limit to cancel a chain, after which the process is ended: the environment blocks it."""
_LONGEST_LINE = 1 << 28
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def load_rows(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the question and the data of each task of a source. Raise SettingError if a setting is invalid."""
    python = settings["python"]
    try:
        process = subprocess.run(
            own_python(bridge.__file__, "rows", executable=python),
            input=json.dumps(settings).encode(),
            stdout=subprocess.PIPE,
            env=_environment(settings),
            timeout=LOAD_SECONDS,
            check=False,
        )
    except OSError as error:
        raise SettingError("verifiers.python", f"{python} cannot be started: {error.strerror}", _PYTHON_FIX) from error
    except subprocess.TimeoutExpired as error:
        problem = f"got {settings['id']!r}, whose tasks were not loaded within {LOAD_SECONDS:g} s"
        raise SettingError("verifiers.id", problem, "set tasks, or correct its load()") from error
    try:
        found = json.loads(process.stdout)
    except (ValueError, RecursionError) as error:
        if not process.stdout and process.returncode == 0:
            raise SettingError("verifiers.python", f"got {python!r}, which is no Python", _PYTHON_FIX) from None
        problem = f"got {settings['id']!r}; its process ended with status {process.returncode} while it loaded"
        raise SettingError("verifiers.id", f"{problem}; its output is above", "correct the environment") from error
    if "refused" in found:
        raise _setting(found["refused"])
    rows: list[dict[str, Any]] = found["rows"]
    return rows


_PYTHON_FIX = "name the python of a virtual environment in which verifiers is installed"


def _setting(refused: list[str]) -> SettingError:
    field, problem, fix = refused
    return SettingError(f"verifiers.{field}", problem, fix)


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of the process: those for code of others, except those of our own Python."""
    found = environment.for_others()
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        found.pop(name, None)
    if settings["folder"] is not None:
        # the servers of an environment's tools import its module, too
        found["PYTHONPATH"] = settings["folder"]
    spare_loopback(found)
    return found


class VerifiersProcess:
    """A process that plays the tasks of one environment. `settings` are those of the source."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._folder = TemporaryDirectory(prefix="agentfactory-verifiers-")
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ended = False

    async def start(self) -> Self:
        """Start the process, and load the environment. Raise SettingError if a setting is invalid."""
        path = str(Path(self._folder.name, "socket"))
        connected: asyncio.Future[_Streams] = asyncio.get_running_loop().create_future()

        def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(connect, path, limit=_LONGEST_LINE)
        command = own_python(bridge.__file__, "play", path, executable=self.settings["python"])
        # ends the harnesses and tool servers that verifiers starts, whatever happens
        self._process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", "-S", keeper.__file__, *command],
            stdin=subprocess.PIPE,
            env=_environment(self.settings),
            start_new_session=True,
        )
        try:
            await self._load(server, connected)
        except BaseException:
            await self.close()
            raise
        return self

    async def _load(self, server: asyncio.Server, connected: "asyncio.Future[_Streams]") -> None:
        exited = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(LOAD_SECONDS), server:
                first: list[asyncio.Future[Any]] = [connected, exited]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                line = b""
                if connected.done():
                    reader, self._writer = connected.result()
                    self._send(self.settings)
                    line = await reader.readline()
                if not line:
                    raise ToolInfrastructureError(f"{self._title} {await self._status()} before it was ready")
        except TimeoutError:
            raise ToolInfrastructureError(f"{self._title} was not loaded within {LOAD_SECONDS:g} s") from None
        finally:
            exited.cancel()
        if "refused" in (found := json.loads(line)):
            raise _setting(found["refused"])
        self._listening = asyncio.create_task(self._listen(reader), name=self._title)

    async def play(self, data: Any, url: str, key: str, model: str) -> dict[str, Any]:
        """Play a task. Return its reward, metrics and answer. Raises AgentFailed (the environment, or its harness,
        failed), ToolInfrastructureError (a sandbox or server of verifiers failed, or the process ended)."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"number": number, "data": data, "url": url, "key": key, "model": model})
            found = await waiting
        except asyncio.CancelledError:
            await self._cancel(number, waiting)
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" not in found:
            return found
        problem = f"{self._title} failed: {found['failed']}"
        raise ToolInfrastructureError(problem) if found["infrastructure"] else AgentFailed(problem)

    async def _cancel(self, number: int, waiting: "asyncio.Future[dict[str, Any]]") -> None:
        """Cancel a chain. End the process if it does not react, because its other chains do not go on either."""
        again = self._waiting[number] = asyncio.get_running_loop().create_future() if waiting.cancelled() else waiting
        self._send({"number": number, "cancel": True})
        if not self.ended and not (await asyncio.wait([again], timeout=CANCEL_SECONDS))[0]:
            await self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                found = json.loads(line)
                if (waiting := self._waiting.get(found.pop("number"))) is not None and not waiting.done():
                    waiting.set_result(found)
        except ConnectionError:
            pass  # the process was killed
        finally:
            self.ended = True
            failed = {"failed": f"its process {await self._status()}", "infrastructure": True}
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(failed)

    async def _status(self) -> str:
        assert self._process.stdin is not None
        try:
            # its launcher exits with its status, unless told to end before
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.stdin.close()
        return f"ended with status {await self._process.wait()}"

    async def close(self) -> None:
        """End the process, and all that it started."""
        self.ended = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        if hasattr(self, "_listening"):
            await asyncio.wait([self._listening])
        self._folder.cleanup()

    @property
    def _title(self) -> str:
        return f"verifiers' {self.settings['id']}"
