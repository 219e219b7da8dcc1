"""`Sandbox`: one sandboxed Python and its workspace, as seen from outside. Nothing that it says is trusted."""

import asyncio
import os
import re
import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import PurePosixPath

from tools.sandbox import bubblewrap, process
from tools.sandbox.process import SandboxProcess
from tools.sandbox.settings import SandboxKind, SandboxSettings, SandboxUnavailable
from tools.sandbox.worker import DATA_BYTES

_START_SECONDS = 60.0
_FILE_SECONDS = 30.0
_GRACE_SECONDS = 0.5
"""Beyond a cell's time limit, in which Python code is interrupted and variables are kept; then all is killed."""
_WATCH_SECONDS = 0.1
_MOST_FILES = 20_000
"""Files and folders in a workspace: each takes about 1 KiB of the kernel's memory, which no size limit counts."""
_STRAY_MESSAGES = 100
_LARGEST_MESSAGE = 1 << 17


class SandboxLost(Exception):
    """The sandbox was ended; the message says why. Its variables and files are gone."""


@dataclass(frozen=True)
class CellResult:
    """What a cell gave. `text` is what a notebook would show: output, value or traceback."""

    text: str
    error: str | None = None
    """Name of the exception; None if the cell ran to its end."""
    lost: str | None = None
    """Why the sandbox was ended, and with it variables and files."""


class Sandbox:
    """A running sandbox, for one caller at a time. `begin` starts one, `ready` waits for it."""

    def __init__(self, settings: SandboxSettings, started: SandboxProcess) -> None:
        self._settings = settings
        self._process = started
        self._fault: str | None = None
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def begin(cls, settings: SandboxSettings) -> "Future[SandboxProcess]":
        """Start one in the background, from any thread; give the result to `ready`, or to `discard`."""
        return process.start(settings, [4 * settings.output_characters])

    @staticmethod
    def discard(starting: "Future[SandboxProcess]") -> None:
        """End one that nobody waits for any more."""
        if not starting.cancel():
            starting.add_done_callback(_kill)

    @classmethod
    async def ready(cls, settings: SandboxSettings, starting: "Future[SandboxProcess]") -> "Sandbox":
        """Wait until the one that was begun answers.

        Raises:
            SandboxUnavailable: it cannot be had on this machine.
            ValueError: a package of the settings is not there.
        """
        try:
            sandbox = cls(settings, await asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            cls.discard(starting)
            raise
        try:
            await sandbox._first_word()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @property
    def lost(self) -> bool:
        """Whether it was ended."""
        return self._fault is not None

    async def run(self, code: str, seconds: float) -> CellResult:
        """Execute one cell, for at most `seconds` and half a second more."""
        if self._fault is not None:
            return CellResult("", "SandboxLost", self._fault)
        source = code.encode("utf-8", "replace")
        if len(source) > DATA_BYTES:
            return CellResult(f"The cell has {len(source)} bytes; {DATA_BYTES} are possible.", "ValueError")
        try:
            pieces = await self._ask("cell", str(seconds), source, seconds + _GRACE_SECONDS)
        except SandboxLost as loss:
            text = bounded(self._process.said(rewind=True), 0, "", self._settings.output_characters)
            self.close(str(loss))
            return CellResult(text, "SandboxLost", str(loss))
        except asyncio.CancelledError:
            self.close("its call was cancelled")
            raise
        answer: dict[str, bytes] = {}
        for name, data in pieces:
            answer[name] = answer.get(name, b"") + data
        return self._result({name: data.decode("utf-8", "replace") for name, data in answer.items()})

    def _result(self, answer: dict[str, str]) -> CellResult:
        """What a notebook shows, out of an answer that may hold anything."""
        head, tail = self._process.said(rewind=True), answer.get("tail", "")
        left_out = int(count) if re.fullmatch(r"\d{1,15}", count := answer.get("left_out", ""), re.ASCII) else 0
        for part in (answer.get("value"), answer.get("traceback")):
            if part:
                printed = tail or head
                tail += part if not printed or printed.endswith("\n") else f"\n{part}"
        text = bounded(head, left_out, tail.rstrip("\n"), self._settings.output_characters)
        return CellResult(text if tail else text.rstrip("\n"), answer.get("error"))

    async def write(self, name: str, content: bytes) -> None:
        """Put a file into the workspace, before any code has run.

        Raises:
            ValueError: the name leads out of the workspace, or it is full.
            SandboxLost: as it says.
        """
        relative = clean_name(name)
        for start in range(0, max(1, len(content)), DATA_BYTES):
            piece = content[start : start + DATA_BYTES]
            for outcome, fault in await self._ask("write", relative, piece):
                if outcome == "fault":
                    raise ValueError(f"files: {name} cannot be written: {fault.decode(errors='replace')}")

    async def read(self) -> dict[str, bytes]:
        """Regular files of the workspace by name, in bounds; those whose name begins with a dot are left out.

        Raises:
            SandboxLost: as it says.
        """
        files: dict[str, bytes] = {}
        size = self._settings.disk_mb << 20
        name = None
        for field, data in await self._ask("read", most=size // DATA_BYTES + 2 * _MOST_FILES):
            if field == "file":
                name = os.fsdecode(data)
            elif field == "content" and name is not None:
                files[name] = files.get(name, b"") + data
        return files

    async def run_script(self, program: str, stdin: str, seconds: float) -> int | None:
        """Let it become the program in the file `program`, which reads the file `stdin`: nothing else follows.

        Returns its exit status (128 and the signal's number if one killed it), or None after `seconds`.
        """
        request = b"\0".join((b"", b"script", program.encode(), stdin.encode()))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self._process.control, request)
                await self._ended()
        except TimeoutError:
            return None
        status = self._process.popen.wait()
        return 128 - status if status < 0 else status

    def said(self, output: int) -> str:
        """What is on its stdout (0) or stderr (1)."""
        return self._process.said(output)

    def close(self, reason: str = "it was closed") -> None:
        """End it, with all that runs in it. To be called any number of times."""
        self._fault = self._fault or reason
        if self._watch is not None:
            self._watch.cancel()
        self._process.kill()

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
            await asyncio.sleep(_WATCH_SECONDS)

    async def _ask(
        self, verb: str, argument: str = "", data: bytes = b"", seconds: float = _FILE_SECONDS, most: int = 64
    ) -> list[tuple[str, bytes]]:
        """Send a request; names and data of the messages that answer it, `most` of them, without the last.

        A message with another nonce was forged, or is late: it is passed over, and after a hundred all is over.
        """
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
                while len(answers) < most and strays < _STRAY_MESSAGES:
                    message = await loop.sock_recv(control, _LARGEST_MESSAGE)
                    if not message:
                        raise SandboxLost(self._fault or "its process ended")
                    whose, _, rest = message.partition(b"\0")
                    name, _, told = rest.partition(b"\0")
                    if whose != nonce:
                        strays += 1
                    elif name == b"end":
                        return answers
                    else:
                        answers.append((name.decode("utf-8", "replace"), told))
                    await asyncio.sleep(0)  # messages that are always there would keep the loop from all else
        except TimeoutError:
            reason = f"it ran for more than {argument} s" if verb == "cell" else "it did not answer"
            raise SandboxLost(reason) from None
        except ConnectionError:
            raise SandboxLost(self._fault or "its process ended") from None
        raise SandboxLost("it flooded its own channel")

    async def _ended(self) -> None:
        """Wait until its process has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        descriptor = os.pidfd_open(self._process.popen.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def bounded(head: str, left_out: int, tail: str, limit: int) -> str:
    """`head` and `tail` in at most `limit` characters and a marker, which counts the `left_out` between them too."""
    if not left_out and len(head) + len(tail) <= limit:
        return head + tail
    half = limit // 2
    if not left_out:
        whole = head + tail
        head, tail = whole[:half], whole[half:]
    left_out += max(0, len(head) - half) + max(0, len(tail) - half)
    return f"{head[:half]}\n[... {left_out} characters left out ...]\n{tail[-half:]}"


def clean_name(name: str) -> str:
    """`name` as a path below the workspace.

    Raises:
        ValueError: it is absolute, leads out, or is none.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"files: {name!r} does not name a file below the workspace; use a relative path without ..")
    return str(path)


def _kill(starting: "Future[SandboxProcess]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
