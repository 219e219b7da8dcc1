"""The process of a sandbox, started off the event loop, with its socket and files."""

import asyncio
import fcntl
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentfactory.base.files.untrusted_files import remove
from agentfactory.base.processes.sandbox_limits import (
    ProgramLimits,
    SandboxKind,
    SandboxSettings,
    SandboxUnavailable,
    sandbox_user,
)
from agentfactory.tools.sandbox import bubblewrap, seccomp
from agentfactory.tools.sandbox.bubblewrap import View
from agentfactory.tools.sandbox.interpreter import Interpreter, find_interpreter, library_folders, package_paths

_WORKER, _HELPERS = (Path(__file__).with_name(name) for name in ("inside_worker.py", "helpers.py"))
_PAGE = 4096
_TOKEN = f"sandbox-of-{os.getpid()}-{secrets.token_hex(8)}"
"""Part of the command line of each sandbox of this process; the reaper finds leftovers by it."""

starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
"""Starts sandboxes: one with --die-with-parent dies with the thread that started it, which must live until the end."""
_reapers: dict[int | None, "subprocess.Popen[bytes]"] = {}
"""Reapers by the user id of their sandboxes; each ends automatically with this process."""


@dataclass
class SandboxProcess:
    """A started sandbox; its first message on the socket confirms that it runs."""

    kind: SandboxKind
    popen: "subprocess.Popen[bytes]"
    control: socket.socket
    """Our end: non-blocking datagrams."""
    outputs: list[int]
    """Memory files of fixed size that replace its stdout and stderr; their file offsets are shared with it."""
    init: int | None = None
    init_handle: int | None = field(default=None, init=False)
    folder: str | None = None
    """Workspace of a sandbox of kind none, which we must remove."""
    status: int | None = None
    """Descriptor from which bwrap's report on a program's end can be read."""
    _killed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.init is not None:
            with suppress(ProcessLookupError):
                self.init_handle = os.pidfd_open(self.init)

    def said(self, output: int = 0, rewind: bool = False) -> str:
        """Return the text of an output; with `rewind` the next text replaces it."""
        descriptor = self.outputs[output]
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        text = os.pread(descriptor, min(end, os.fstat(descriptor).st_size), 0)
        if rewind:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return text.decode("utf-8", "replace")

    def kill(self) -> None:
        """Kill the sandbox and everything in it. Idempotent."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            if self.kind is SandboxKind.NONE:
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.kill()
        if self.init_handle is not None:
            # it dies with bwrap only after its setup
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_handle, signal.SIGKILL)
            os.close(self.init_handle)
        with suppress(RuntimeError):  # this process is ending
            starter.submit(self._reap)

    def free(self) -> None:
        """Kill the sandbox, and close our ends, on which nothing must be waiting."""
        self.kill()
        self.control.close()
        while self.outputs:
            os.close(self.outputs.pop())
        if self.status is not None:
            os.close(self.status)
            self.status = None

    def _reap(self) -> None:
        self.popen.wait()
        if self.folder is not None:
            remove(Path(self.folder))


def start_program(
    command: list[str],
    view: View,
    env: Mapping[str, str],
    limits: ProgramLimits,
    outputs: list[int],
    port: int | None,
    full: bool,
) -> SandboxProcess:
    """Start a program that may start others, in the thread of `starter`. `port`: the first message on the socket
    carries the socket that listens on it inside. `full`: no file can grow."""
    user = sandbox_user()
    interpreter = find_interpreter(user)
    _watch_over(interpreter, user)
    bwrap = bubblewrap.find_bwrap(user)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    enter: list[str] = []
    if port is not None:
        folders = (interpreter.executable, *library_folders(interpreter))
        view = replace(view, readable=(*view.readable, *folders))
        enter = [*_helper(interpreter, "enter"), str(theirs.fileno()), str(port)]

    def arguments(status: int, seccomp: int, variables: int) -> list[str]:
        prefix = bubblewrap.program_command(bwrap, view, limits.memory_mb, seccomp, variables, status)
        # the token, which the reaper looks for, is the shell's $0
        return [*prefix, *enter, "/bin/sh", "-c", _limited(limits, full), _TOKEN, view.start, *command]

    try:
        passed = () if port is None else (theirs.fileno(),)
        contents = [_filter(processes=True), bubblewrap.variables(env)]
        popen, status = _popen_bwrap(arguments, contents, user, outputs, passed)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return SandboxProcess(SandboxKind.BUBBLEWRAP, popen, ours, [], _read_init(status), status=status)


def _limited(limits: ProgramLimits, full: bool) -> str:
    """Return a shell program that sets limits (-f: blocks of 512 B), and becomes the command in $1, or / if locked."""
    told = f"files take more than {limits.disk_mb} MiB, or cannot be measured: none can grow before some are removed"
    size = f"trap '' XFSZ; ulimit -f 0; echo '{told}' >&2; " if full else f"ulimit -f {limits.disk_mb << 11}; "
    return (
        f"ulimit -p {limits.processes} 2>/dev/null || ulimit -u {limits.processes} || exit 125; "
        f"ulimit -n 4096; ulimit -c 0; {size}"
        'cd "$1" 2>/dev/null || echo "$1 cannot be entered; this begins in /" >&2; shift; unset OLDPWD; '
        'command -v "$1" >/dev/null || { echo "$1 cannot be started: No such file or directory" >&2; exit 127; }; '
        'exec "$@"'
    )


def start(settings: SandboxSettings, output_bytes: list[int]) -> SandboxProcess:
    """Start a sandbox, in the thread of `starter`. `output_bytes`: one size for stdout and stderr, or one for each."""
    bubblewrapped = settings.kind is SandboxKind.BUBBLEWRAP
    user = sandbox_user() if bubblewrapped else None
    interpreter = find_interpreter(user)
    packages = package_paths(settings.packages, interpreter)
    _watch_over(interpreter, user)
    folder = None if bubblewrapped else tempfile.mkdtemp(prefix="sandbox-")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outputs = [_bounded_file(size) for size in output_bytes]
    program = [str(interpreter.executable), "-I", "-S", "-B", "-X", "utf8"]
    init = None
    try:
        if bubblewrapped:
            bwrap = bubblewrap.find_bwrap(user)

            def arguments(info: int, seccomp: int, env: int, worker: int) -> list[str]:
                prefix = bubblewrap.command(bwrap, interpreter, packages, settings, seccomp, env, info, worker)
                path = [bubblewrap.PACKAGES] if packages else []
                return [*prefix, *program, bubblewrap.WORKER, *_options(theirs, bubblewrap.WORKSPACE, settings), *path]

            variables = bubblewrap.variables(bubblewrap.environment(bubblewrap.WORKSPACE))
            contents = [_filter(), variables, _WORKER.read_bytes()]
            popen, info = _popen_bwrap(arguments, contents, user, outputs, (theirs.fileno(),))
            init = _read_init(info)
            os.close(info)
        else:
            path = sorted({str(package.parent) for package in packages.values()})
            command = [*program, str(_WORKER), *_options(theirs, str(folder), settings), *path]
            popen = _popen(command, bubblewrap.environment(str(folder)), user, outputs, (theirs.fileno(),))
    except BaseException:
        ours.close()
        for descriptor in outputs:
            os.close(descriptor)
        if folder is not None:
            os.rmdir(folder)
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return SandboxProcess(settings.kind, popen, ours, outputs, init, folder)


def _popen_bwrap(
    arguments: Callable[..., list[str]],
    contents: list[bytes],
    user: int | None,
    outputs: list[int],
    passed: tuple[int, ...],
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start bwrap by `arguments`, which gets a descriptor to write to and one for each of `contents`."""
    read_end, write_end = os.pipe()
    inherited = [write_end]
    try:
        inherited += map(_filled_file, contents)
        return _popen(arguments(*inherited), {}, user, outputs, (*passed, *inherited)), read_end
    except BaseException:
        os.close(read_end)
        raise
    finally:
        for descriptor in inherited:
            os.close(descriptor)


def _options(control: socket.socket, folder: str, settings: SandboxSettings) -> list[str]:
    follow = "follow" if settings.kind is SandboxKind.NONE else "bwrap"
    limits = ",".join(f"{name}={value}" for name, value in settings.limits.items())
    return [str(control.fileno()), folder, str(settings.output_characters // 2), follow, limits, _TOKEN]


def _watch_over(interpreter: Interpreter, user: int | None) -> None:
    if user not in _reapers:
        command = [*_helper(interpreter, "reap"), _TOKEN]
        _reapers[user] = _popen(command, {}, user, [subprocess.DEVNULL], (), stdin=subprocess.PIPE)


def _helper(interpreter: Interpreter, name: str) -> list[str]:
    return [str(interpreter.executable), "-I", "-S", "-c", _HELPERS.read_text(), name]


def _popen(
    command: list[str],
    environment: dict[str, str],
    user: int | None,
    outputs: list[int],
    inherited: tuple[int, ...],
    stdin: int = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    drop: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=stdin,
            stdout=outputs[0],
            stderr=outputs[-1],
            pass_fds=inherited,
            start_new_session=True,  # so that Ctrl-C ends the chains first
            **drop,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{command[0]} could not be started as user {user or os.geteuid()}: {error}") from None


def _filter(processes: bool = False) -> bytes:
    machine = platform.machine()
    if machine not in seccomp.MACHINES:
        problem = f"the sandbox has no list of system calls for {machine}, only for {', '.join(seccomp.MACHINES)}"
        raise SandboxUnavailable(problem, "run it on such a machine")
    return seccomp.program(machine, processes)


def _bounded_file(size: int) -> int:
    descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, -(-size // _PAGE) * _PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def _filled_file(content: bytes) -> int:
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def ended(handle: int) -> None:
    """Wait until the process of a pidfd has ended, and close the pidfd."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(handle, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _read_init(descriptor: int) -> int | None:
    """Return the process id that bwrap reports; None if it ended without a report."""
    text = b""
    # read no byte more: the exit status of a program that has already ended comes next
    while b"}" not in text and (piece := os.read(descriptor, 1)):
        text += piece
    return json.loads(text)["child-pid"] if text.strip() else None
