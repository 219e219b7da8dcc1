"""`run_program`: a sandboxed program that may start others; none of them is left when it returns. `start_confined`: a
program of ours that reads text of others, with bubblewrap as a second wall around its parsers."""

import array
import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.sandbox_limits import ProgramLimits, SandboxUnavailable, sandbox_user
from agentfactory.base.run_notices import notify
from agentfactory.tools.sandbox import bubblewrap, disk_use, process
from agentfactory.tools.sandbox.bubblewrap import View
from agentfactory.tools.sandbox.disk_use import DiskUse, add_deleted, measure
from agentfactory.tools.sandbox.process import SandboxProcess
from agentfactory.tools.sandbox.session import bounded

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
_FIRST_DISK_SECONDS, _DISK_SECONDS, _DISK_SHARE = 0.05, 1.0, 0.1
"""First disk measurement, interval of later ones, and the share of a core for all, which lengthens it."""
_watched = set[object]()
_measuring = ThreadPoolExecutor(2, "disk use")
"""Only two threads, because each may have many folders open."""
_LEAST_FREE = 1 << 30, 0.05
"""Space to keep free on a file system: bytes, or a share of its size if that is less. Measurements miss files that are
deleted but mapped, or in transit through a socket."""
_MOST_SOCKETS = 4096
"""Maximum number of sockets: their unread data takes about 200 KiB of kernel memory each."""

_SIZES = re.compile(rb"^(RssAnon|RssShmem|VmSwap|VmPTE):\s+(\d+)", re.MULTILINE)
_SHARES = re.compile(rb"^(Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+)", re.MULTILINE)
"""Memory of a process, in KiB: `_SIZES` counts shared pages in full, `_SHARES` divides them among their users."""

Listening = Callable[[socket.socket], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program. None of its text can be trusted."""

    status: int
    stdout: str
    stderr: str
    ended: str | None = None
    """Reason why it was killed, such as `it ran for more than 5 s`; None if it exited."""


async def run_program(
    command: list[str],
    view: View,
    limits: ProgramLimits,
    env: Mapping[str, str],
    *,
    seconds: float | None = None,
    characters: int = 65536,
    merged: bool = False,
    port: int | None = None,
    listening: Listening | None = None,
) -> ProgramResult:
    """Run a program until it exits or exceeds a limit. When this returns or is cancelled, none of its processes is
    left. Raises SandboxUnavailable if this machine cannot run a sandbox, or cannot mount `view`.

    Args:
        command: The program and its arguments, with paths inside.
        limits: Limits of the program and its descendants together.
        env: Its whole environment.
        seconds: Time limit; None for none.
        characters: Characters kept of stdout and of stderr, from the beginning and the end.
        merged: True to redirect stderr to stdout.
        port: Port on 127.0.0.1 inside where `listening` answers; nothing else is reachable.
    """
    before = await _measured(list(view.folders.values()))
    # files over the limit cannot grow, even by programs too short to be measured; they can be removed
    full = before.problem is not None or before.size > limits.disk_mb << 20
    outputs = [_Output(characters) for _ in range(1 if merged else 2)]
    arguments = command, view, env, limits, [output.write_end for output in outputs], port, full
    try:
        started = await _started(process.starter.submit(process.start_program, *arguments))
    except BaseException:
        for output in outputs:
            output.drop()
        raise
    reading = [asyncio.create_task(output.read()) for output in outputs]
    try:
        async with AsyncExitStack() as stack:
            if listening is not None and (listener := await _listener(started)) is not None:
                await stack.enter_async_context(listening(listener))
            ended = await _supervised(started, view, limits, before, seconds)
    finally:
        await _nothing_left(started)
        await asyncio.wait(reading)
        said = [output.text() for output in outputs]
        told = b""
        if started.status is not None:
            while piece := os.read(started.status, 4096):
                told += piece
        started.free()
    # bwrap reports the status only of a program that it has started
    if b"exit-code" not in told and ended is None:
        raise bubblewrap.refusal(said[-1])
    status = started.popen.wait()
    return ProgramResult(128 - status if status < 0 else status, said[0], said[-1] if not merged else "", ended)


async def _started(starting: "Future[SandboxProcess]") -> SandboxProcess:
    waiting = asyncio.wrap_future(starting)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not starting.cancel():  # it is being started, and uses the outputs
            await asyncio.wait([waiting])
            if waiting.exception() is None:
                await _nothing_left(waiting.result())
                waiting.result().free()
        raise


async def _supervised(
    started: SandboxProcess, view: View, limits: ProgramLimits, before: DiskUse, seconds: float | None
) -> str | None:
    """Wait for an exit (None), or a reason to kill the program. `before`: disk usage of its folders at its start."""
    folders = list(view.folders.values())
    in_memory = [place for place in ("/dev/shm", "/tmp") if place not in view.folders]
    watches = [_memory(started, limits.memory_mb, in_memory), _disk(started, folders, limits.disk_mb, before)]
    watches += [_free_space(folders), *([] if seconds is None else [_clock(seconds)])]
    tasks = [asyncio.create_task(watch) for watch in watches]
    end = asyncio.create_task(process.ended(os.pidfd_open(started.popen.pid)))
    try:
        done, _ = await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
        return None if end in done else next(task.result() for task in tasks if task in done)
    finally:
        for task in (end, *tasks):
            task.cancel()
        await asyncio.wait([end, *tasks])


async def _clock(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"it ran for more than {seconds:g} s"


async def _memory(started: SandboxProcess, most: int, in_memory: list[str]) -> str:
    """Wait until the program exceeds the memory or socket limit; return the reason. `in_memory`: folders in memory."""
    while True:
        await asyncio.sleep(0.05)
        if started.init is None:
            continue
        used = [_used_at(f"/proc/{started.init}/root", place) for place in in_memory]
        # each file of a tmpfs, even an empty one, takes 1 KiB of kernel memory
        files, blocks = sum(files for files, _ in used), sum(blocks for _, blocks in used)
        # memory that processes share, as after a fork, counts once: the second, slower sum
        if any(files + _taken(started.init, blocks, shared_once) <= most << 10 for shared_once in (False, True)):
            if _sockets(started.init) > _MOST_SOCKETS:
                return f"it had more than {_MOST_SOCKETS} sockets"
            continue
        return f"it took more than {most} MiB of memory"


def _taken(root: int, blocks: int, shared_once: bool) -> int:
    """Return the memory of a process and its descendants in KiB, with page tables and `blocks` KiB of files in memory,
    which they may have mapped. `shared_once` takes longer."""
    total = mapped = 0
    for pid in _processes(root):
        with suppress(OSError):  # the process has ended
            found = _SIZES.findall(_content(f"/proc/{pid}/status"))
            if shared_once:
                # root without capabilities, as in docker, may not read this
                with suppress(PermissionError):
                    tables = [(name, size) for name, size in found if name == b"VmPTE"]
                    found = tables + _SHARES.findall(_content(f"/proc/{pid}/smaps_rollup"))
            total += sum(int(size) for _, size in found)
            mapped += sum(int(size) for name, size in found if name in (b"RssShmem", b"Pss_Shmem"))
    return total + max(0, blocks - mapped)


def _processes(root: int) -> Iterator[int]:
    waiting = [root]
    while waiting:
        yield (pid := waiting.pop())
        with suppress(OSError):  # the process has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    waiting += map(int, _content(f"/proc/{pid}/task/{thread}/children").split())


def _content(file: str) -> bytes:
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


def _used_at(root: str, place: str) -> tuple[int, int]:
    """Return the number of files on a sandbox's file system, and the KiB of their blocks; 0 if inaccessible."""
    try:
        if os.stat(root).st_dev == os.stat("/").st_dev:  # bwrap has not left the machine's root yet
            return 0, 0
        found = os.statvfs(root + place)
    except OSError:
        return 0, 0
    return found.f_files - found.f_ffree, (found.f_blocks - found.f_bfree) * found.f_frsize >> 10


def _sockets(pid: int) -> int:
    try:
        return int(_content(f"/proc/{pid}/net/sockstat").split()[2])  # sockets: used N
    except OSError:
        return 0


async def _free_space(folders: list[Path]) -> str:
    while True:
        await asyncio.sleep(_DISK_SECONDS)  # first give the program time to remove files
        for folder in folders:
            space = os.statvfs(folder)
            least = min(_LEAST_FREE[0], int(_LEAST_FREE[1] * space.f_blocks * space.f_frsize))
            if space.f_bavail * space.f_frsize < least:
                return f"the disk of its files has less than {least >> 20} MiB left"


async def _disk(started: SandboxProcess, folders: list[Path], most: int, before: DiskUse) -> str:
    allowed = max(most << 20, before.size)  # a program whose folders exceed the limit must be able to remove files
    pause, seconds = _FIRST_DISK_SECONDS, before.seconds
    _watched.add(program := object())
    try:
        while True:
            await asyncio.sleep(max(pause, len(_watched) * seconds / _DISK_SHARE))
            use = await _measured(folders, started.init)
            if use.problem is not None:
                return use.problem
            if use.size > allowed:
                return f"its files took more than {most} MiB"
            pause, seconds = min(2 * pause, _DISK_SECONDS), use.seconds
    finally:
        _watched.remove(program)


async def _measured(folders: list[Path], root: int | None = None) -> DiskUse:
    processes = () if root is None else _processes(root)
    return await asyncio.get_running_loop().run_in_executor(_measuring, _measure, folders, processes)


def _measure(folders: list[Path], processes: Iterable[int]) -> DiskUse:
    use = measure(folders)
    if use.locked and (user := sandbox_user()) is None:  # root's own rights suffice
        command = [*bubblewrap.reader(bubblewrap.find_bwrap(user)), sys.executable, "-I", "-S", disk_use.__file__]
        done = subprocess.run([*command, *folders], capture_output=True, check=True)
        use = DiskUse(*json.loads(done.stdout))
    add_deleted(use, folders, processes)
    return use


async def _listener(started: SandboxProcess) -> socket.socket | None:
    """Receive the socket that listens inside; None if the sandbox ended before that."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(started.control, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(started.control)
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    try:
        _, ancillary, _, _ = started.control.recvmsg(16, room)
    except ConnectionError:
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            listener = socket.socket(fileno=array.array("i", data)[0])
            listener.setblocking(False)
            return listener
    return None


async def _nothing_left(started: SandboxProcess) -> None:
    """Kill all processes of the sandbox, and wait for their end, even if this task is cancelled again meanwhile."""
    init = None if started.init_handle is None else os.dup(started.init_handle)
    started.kill()
    if init is not None:
        await waited_for(process.ended(init))  # the namespace's first process ends after all others


async def waited_for(event: Coroutine[Any, Any, Any]) -> None:
    """Wait for `event`, even if this task is cancelled again meanwhile."""
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        raise


class _Output:
    """A pipe that keeps the beginning and the end of its data."""

    def __init__(self, characters: int) -> None:
        self._most = characters
        self._head, self._tail, self._left_out = b"", b"", 0
        self._read_end, self.write_end = os.pipe()

    def drop(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    async def read(self) -> None:
        os.close(self.write_end)
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._read_end, "rb", 0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await reader.read(_CHUNK):
                room = max(0, self._most - len(self._head))
                self._head += chunk[:room]
                tail = self._tail + chunk[room:]
                self._tail = tail[-self._most :]
                self._left_out += len(tail) - len(self._tail)
        finally:
            transport.close()

    def text(self) -> str:
        if not self._left_out:
            return bounded((self._head + self._tail).decode("utf-8", "replace"), 0, "", self._most)
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        return bounded(head, self._left_out, tail, self._most)


def start_confined(command: list[str], env: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start `command` like subprocess.Popen, ending with this process, without network, home and other processes.
    Without bubblewrap, it sees all, with a notice."""
    try:
        prefix = _confinement()
    except SandboxUnavailable as error:
        notify(logger, "confinement", f"programs that read a model's answers have only their own parsers: {error}")
        return subprocess.Popen(command, env=env, **options)
    # the process that it would follow has another number inside
    env = {name: value for name, value in env.items() if name != parent_watch.VARIABLE}
    env |= {"HOME": "/tmp", "TMPDIR": "/tmp"}

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*prefix, *command], env=env, **options)

    return process.starter.submit(start).result()


@cache
def _confinement() -> list[str]:
    """Return the arguments before a command, which were tried. Raises SandboxUnavailable."""
    path = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    further = [folder for folder in path if folder.is_dir() and not Path.home().is_relative_to(folder)]
    # an environment may be a link, also within a folder of PYTHONPATH, which would hide it
    own = [Path(sys.prefix), Path(sys.base_prefix)]
    apart = [path for path in own if not any(path.is_relative_to(folder) for folder in further)]
    readable = [*further, *(path.resolve() for path in own), *apart, Path(__file__).resolve().parents[2]]
    prefix = bubblewrap.reading_command(bubblewrap.find_bwrap(None), readable)
    tried = subprocess.run([*prefix, sys.executable, "-I", "-S", "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise bubblewrap.refusal(tried.stderr)
    return prefix
