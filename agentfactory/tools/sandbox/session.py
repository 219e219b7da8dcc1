"""`Sandbox`: one sandboxed Python and its workspace, seen from outside. None of its answers is trusted."""

import asyncio
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from signal import Signals

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.sandbox_limits import SandboxKind, SandboxSettings, SandboxUnavailable
from agentfactory.base.user_code.row_files import is_inside
from agentfactory.tools.sandbox import bubblewrap, process
from agentfactory.tools.sandbox.inside_worker import DATA_BYTES
from agentfactory.tools.sandbox.process import SandboxProcess

_START_SECONDS = 60.0
_GRACE_SECONDS = 0.5
"""Time after a cell's limit in which Python code is interrupted and keeps its variables."""
_MOST_FILES = 20_000
"""Maximum files and folders in a workspace: each takes about 1 KiB of kernel memory, which no limit counts."""
_STRAY_MESSAGES = 100
_LARGEST_MESSAGE = 1 << 17
_STDOUT_BYTES, _STDERR_BYTES = 1 << 20, 1 << 16
_PROGRAM, _INPUT = "main.py", ".stdin"


class SandboxLost(ToolInfrastructureError):
    """The sandbox was ended; the message gives the reason. Its variables and files are gone."""


@dataclass(frozen=True)
class CellResult:
    """The result of a cell. `text` is its output, value or traceback, as in a notebook."""

    text: str
    error: str | None = None
    lost: str | None = None
    """Reason why the sandbox was ended, which also removes variables and files; None if it was not."""


@dataclass(frozen=True)
class ScriptResult:
    """The result of a program. None of it can be trusted: the program could have printed anything."""

    stdout: str
    """The first MiB."""
    stderr: str
    """The first 64 KiB."""
    status: int
    timed_out: bool


class Sandbox:
    """A running sandbox, for one caller at a time. `begin` starts a sandbox, `ready` waits for it."""

    def __init__(self, settings: SandboxSettings, started: SandboxProcess) -> None:
        self._settings = settings
        self._process = started
        self._fault: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._busy = self._closed = False

    @classmethod
    def begin(cls, settings: SandboxSettings) -> "Future[SandboxProcess]":
        """Start a sandbox in the background, from any thread; pass the result to `ready`, or to `discard`."""
        return process.starter.submit(process.start, settings, [4 * settings.output_characters])

    @staticmethod
    def discard(starting: "Future[SandboxProcess]") -> None:
        if not starting.cancel():
            starting.add_done_callback(lambda started: None if started.exception() else started.result().free())

    @classmethod
    async def ready(
        cls, settings: SandboxSettings, starting: "Future[SandboxProcess]", files: Mapping[str, bytes] | None = None
    ) -> "Sandbox":
        """Wait until a started sandbox answers, and write `files` (name -> content). Raises SandboxUnavailable, or
        ValueError for a missing package, or a file that does not fit."""
        try:
            sandbox = cls(settings, await asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            cls.discard(starting)
            raise
        try:
            await sandbox._first_word()
            for name, content in (files or {}).items():
                await sandbox.write(name, content)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @property
    def lost(self) -> bool:
        return self._fault is not None

    async def run(self, code: str, seconds: float) -> CellResult:
        """Execute one cell, for at most `seconds` plus half a second."""
        if self._fault is not None:
            return CellResult("", "SandboxLost", self._fault)
        source = code.encode("utf-8", "replace")
        if len(source) > DATA_BYTES:
            return CellResult(f"The cell has {len(source)} bytes; {DATA_BYTES} are possible.", "ValueError")
        with self._in_use():
            try:
                pieces = await self._ask("cell", str(seconds), source, seconds + _GRACE_SECONDS)
            except SandboxLost as loss:
                text = bounded(self._process.said(rewind=True), 0, "", self._settings.output_characters)
                self.close(str(loss))
                return CellResult(text.rstrip("\n"), "SandboxLost", str(loss))
            except asyncio.CancelledError:
                self.close("its call was cancelled")
                raise
            answer: dict[str, bytes] = {}
            for name, data in pieces:
                answer[name] = answer.get(name, b"") + data
            return self._result({name: data.decode("utf-8", "replace") for name, data in answer.items()})

    def _result(self, answer: dict[str, str]) -> CellResult:
        head, tail = self._process.said(rewind=True), answer.get("tail", "")
        left_out = int(count) if re.fullmatch(r"\d{1,15}", count := answer.get("left_out", ""), re.ASCII) else 0
        for part in (answer.get("value"), answer.get("traceback")):
            if part:
                printed = tail or head
                tail += part if not printed or printed.endswith("\n") else f"\n{part}"
        text = bounded(head, left_out, tail, self._settings.output_characters)
        return CellResult(text.rstrip("\n"), answer.get("error", "")[:100] or None)

    async def write(self, name: str, content: bytes) -> None:
        """Write a file to the workspace. Raises ValueError if it leads out or does not fit, SandboxLost."""
        if not is_inside(name):
            raise ValueError(f"files: {name!r} does not name a file of the workspace; give a relative path without ..")
        for start in range(0, max(1, len(content)), DATA_BYTES):
            piece = content[start : start + DATA_BYTES]
            with self._in_use():
                told = await self._ask("append" if start else "write", name, piece)
            for outcome, fault in told:
                if outcome == "fault":
                    raise ValueError(f"files: {name} cannot be written: {fault.decode(errors='replace')}")

    async def read(self, patterns: Sequence[str], largest: int) -> dict[str, bytes | None]:
        """Return new or changed regular files of the workspace that match `patterns`, of at most `largest` bytes
        together; None for one that does not fit. Raises SandboxLost."""
        files: dict[str, bytearray | None] = {}
        name = ""
        argument = "\n".join((str(largest), *patterns))
        with self._in_use():
            told = await self._ask("read", argument, most=_MOST_FILES, room=2 * largest)
        for field, data in told:
            if field in ("file", "large"):
                name = data.decode("utf-8", "replace")
            if not (any(fnmatch(name, pattern) for pattern in patterns) and is_inside(name)):
                continue
            content = files.setdefault(name, None if field == "large" else bytearray())
            if field == "content" and content is not None:
                content.extend(data)
        room = largest
        kept: dict[str, bytes | None] = {}
        for name, content in files.items():
            room -= len(content or b"")
            kept[name] = bytes(content) if content is not None and room >= 0 else None
        return kept

    async def run_script(self, program: str, stdin: str, seconds: float) -> int | None:
        """Run the file `program` in the sandbox's process, with the file `stdin` as input. This is its last request.
        Return its exit status (128 plus the signal's number if a signal killed it), or None after `seconds`."""
        request = b"\0".join((b"", b"script", program.encode(), stdin.encode()))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self._process.control, request)
                await self._ended()
        except TimeoutError:
            return None
        status = self._process.popen.wait()
        return 128 - status if status < 0 else status

    def close(self, reason: str = "it was closed") -> None:
        """End the sandbox and everything in it; a request in progress is lost. Idempotent."""
        self._fault = self._fault or reason
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._process.kill()
        if not self._busy:
            self._process.free()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep our ends open in this context, even if `close` is called in it."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            if self._closed:
                self._process.free()

    async def _first_word(self) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS):
                message = await asyncio.get_running_loop().sock_recv(self._process.control, _LARGEST_MESSAGE)
        except TimeoutError:
            raise SandboxUnavailable(f"a sandbox did not start within {_START_SECONDS:.0f} s") from None
        except ConnectionError:
            message = b""
        if not message:
            said = self._process.said(-1)
            if self._settings.kind is SandboxKind.NONE:
                raise SandboxUnavailable(f"the interpreter did not start: {said.strip()}")
            raise bubblewrap.refusal(said)
        if self._process.init is not None:
            workspace = os.open(f"/proc/{self._process.init}/root{bubblewrap.WORKSPACE}", os.O_PATH | os.O_DIRECTORY)
            self._watch = asyncio.create_task(self._watch_files(workspace))
            self._watch.add_done_callback(lambda _: os.close(workspace))

    async def _watch_files(self, workspace: int) -> None:
        while self._fault is None:
            status = os.fstatvfs(workspace)
            if status.f_files - status.f_ffree > _MOST_FILES:
                self._fault = f"its workspace had more than {_MOST_FILES} files"
                self._process.popen.kill()
            await asyncio.sleep(0.1)

    async def _ask(
        self,
        verb: str,
        argument: str,
        data: bytes = b"",
        seconds: float = 30.0,
        most: int = 64,
        room: int = 1 << 22,
    ) -> list[tuple[str, bytes]]:
        """Send a request; return the names and data of all answers but the last: at most `most` answers, of `room`
        bytes together. Messages with another nonce are forged or late; after a hundred of them the sandbox is ended."""
        if self._fault is not None:
            raise SandboxLost(self._fault)
        loop, control = asyncio.get_running_loop(), self._process.control
        nonce = secrets.token_hex(16).encode()
        request = b"\0".join((nonce, verb.encode(), os.fsencode(argument), data))
        answers: list[tuple[str, bytes]] = []
        strays = 0
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(control, request)
                while len(answers) < most and strays < _STRAY_MESSAGES and room >= 0:
                    message = await loop.sock_recv(control, _LARGEST_MESSAGE)
                    if not message:
                        raise ConnectionResetError
                    whose, _, rest = message.partition(b"\0")
                    name, _, told = rest.partition(b"\0")
                    if whose != nonce:
                        strays += 1
                    elif name == b"end":
                        return answers
                    else:
                        answers.append((name.decode("utf-8", "replace"), told))
                        room -= len(told)
                    await asyncio.sleep(0)  # an endless stream of messages would starve the event loop
        except TimeoutError:
            reason = f"it ran for more than {argument} s" if verb == "cell" else "it did not answer"
            raise SandboxLost(reason) from None
        except ConnectionError:
            raise SandboxLost(await self._end()) from None
        raise SandboxLost("it flooded its own channel")

    async def _end(self) -> str:
        if self._fault is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_SECONDS):
                    await self._ended()
        status = self._process.popen.poll()
        if self._fault is not None or status is None:
            return self._fault or "it closed its channel"
        try:
            return f"its process was ended by {Signals(-status if status < 0 else status - 128).name}"
        except ValueError:
            return f"its process ended with status {status}"

    async def _ended(self) -> None:
        await process.ended(os.pidfd_open(self._process.popen.pid))


async def run_script(
    code: str,
    stdin: str = "",
    *,
    seconds: float = 10.0,
    memory_mb: int = 256,
    files: dict[str, bytes] | None = None,
    settings: SandboxSettings | None = None,
) -> ScriptResult:
    """Run `code` in a fresh sandbox with `files` (name -> content). Raises SandboxUnavailable, or ValueError."""
    settings = settings or SandboxSettings(memory_mb=memory_mb)
    starting = process.starter.submit(process.start, settings, [_STDOUT_BYTES, _STDERR_BYTES])
    own = {_PROGRAM: code.encode("utf-8", "replace"), _INPUT: stdin.encode("utf-8", "replace")}
    sandbox = await Sandbox.ready(settings, starting, {**(files or {}), **own})
    try:
        status = await sandbox.run_script(_PROGRAM, _INPUT, seconds)
        stdout, stderr = (sandbox._process.said(output) for output in (0, 1))
        return ScriptResult(stdout, stderr, 137 if status is None else status, status is None)
    finally:
        sandbox.close()


def bounded(head: str, left_out: int, tail: str, limit: int) -> str:
    """Return `head` and `tail` in at most `limit` characters plus a marker, which counts `left_out` characters, too."""
    if not left_out and len(head) + len(tail) <= limit:
        return head + tail
    half = limit // 2
    if not left_out:
        whole = head + tail
        head, tail = whole[:half], whole[half:]
    left_out += max(0, len(head) - half) + max(0, len(tail) - half)
    return f"{head[:half]}\n[... {left_out} characters left out ...]\n{tail[-half:]}"
