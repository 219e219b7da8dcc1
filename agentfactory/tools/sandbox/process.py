"""Starts the process of a sandbox, off the event loop, and holds its socket and files."""

import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfactory.tools.sandbox import bubblewrap, seccomp
from agentfactory.tools.sandbox.interpreter import Interpreter, find_interpreter, package_paths
from agentfactory.tools.sandbox.settings import SandboxKind, SandboxSettings, SandboxUnavailable

_WORKER, _REAPER = Path(__file__).with_name("worker.py"), Path(__file__).with_name("reaper.py")
_PAGE = 4096
_TOKEN = f"sandbox-of-{os.getpid()}-{secrets.token_hex(8)}"
"""Part of the command line of each sandbox of this process, by which the reaper finds leftovers."""

# A child with --die-with-parent dies with the thread that started it, so that thread must live until the end. One is
# enough: a start takes some milliseconds.
_starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
_reapers: dict[int | None, "subprocess.Popen[bytes]"] = {}
"""By the user of the sandboxes; each ends automatically with this process."""


@dataclass
class SandboxProcess:
    """A sandbox that was started; its first message on the socket shows whether it runs."""

    kind: SandboxKind
    popen: "subprocess.Popen[bytes]"
    control: socket.socket
    """Our end: non-blocking datagrams."""
    outputs: list[int]
    """Memory files of fixed size that replace its stdout and stderr; their file offsets are shared with it."""
    init: int | None = None
    """Process number of the first process inside, as seen from outside."""
    init_handle: int | None = None
    """Descriptor of that process."""
    folder: str | None = None
    """Workspace of a sandbox of kind none, which we must remove."""
    _killed: bool = field(default=False, init=False)

    def said(self, output: int = 0, rewind: bool = False) -> str:
        """Return what was written to an output; with `rewind` the next text replaces it."""
        descriptor = self.outputs[output]
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        text = os.pread(descriptor, min(end, os.fstat(descriptor).st_size), 0)
        if rewind:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return text.decode("utf-8", "replace")

    def kill(self) -> None:
        """End it and everything in it immediately. May be called any number of times."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            if self.kind is SandboxKind.NONE:
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.kill()
        if self.init_handle is not None:
            # it follows bwrap only after its setup
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_handle, signal.SIGKILL)
            os.close(self.init_handle)
        with suppress(RuntimeError):  # this process is ending
            _starter.submit(self._reap)

    def free(self) -> None:
        """Kill it, and close our ends; nothing may be waiting on them."""
        self.kill()
        self.control.close()
        while self.outputs:
            os.close(self.outputs.pop())

    def _reap(self) -> None:
        self.popen.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def start(settings: SandboxSettings, output_bytes: list[int]) -> "Future[SandboxProcess]":
    """Start a sandbox in the background. `output_bytes`: one size for stdout and stderr together, or one for each."""
    return _starter.submit(_start, settings, output_bytes)


def _start(settings: SandboxSettings, output_bytes: list[int]) -> SandboxProcess:
    bubblewrapped = settings.kind is SandboxKind.BUBBLEWRAP
    # real root is exempt from process limits, and could read more: its sandboxes run as nobody
    user = 65534 if bubblewrapped and os.geteuid() == 0 else None
    interpreter = find_interpreter(user)
    packages = package_paths(settings.packages, interpreter)
    if user not in _reapers:
        _reapers[user] = _start_reaper(interpreter, user)
    folder = None if bubblewrapped else tempfile.mkdtemp(prefix="sandbox-")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outputs = [_bounded_file(size) for size in output_bytes]
    inherited, ends = [], []
    try:
        program = [str(interpreter.executable), "-I", "-S", "-B", "-X", "utf8"]
        environment: dict[str, str] | None = None
        read_end = None
        if bubblewrapped:
            read_end, write_end = os.pipe()
            ends.append(read_end)
            inherited += [write_end, _filled_file(_filter()), _filled_file(_WORKER.read_bytes())]
            prefix = bubblewrap.command(
                bubblewrap.find_bwrap(user),
                interpreter,
                packages,
                settings,
                info=inherited[0],
                seccomp=inherited[1],
                worker=inherited[2],
            )
            path = [bubblewrap.PACKAGES] if packages else []
            command = [*prefix, *program, bubblewrap.WORKER, *_options(theirs, bubblewrap.WORKSPACE, settings), *path]
        else:
            environment = bubblewrap.environment(str(folder))
            path = sorted({str(package.parent) for package in packages.values()})
            command = [*program, str(_WORKER), *_options(theirs, str(folder), settings), *path]
        popen = _popen(command, environment, user, outputs, (theirs.fileno(), *inherited))
        for descriptor in inherited:
            os.close(descriptor)
        inherited = []
        init = _read_init(read_end) if read_end is not None else None
    except BaseException:
        ours.close()
        for descriptor in outputs:
            os.close(descriptor)
        if folder is not None:
            os.rmdir(folder)
        raise
    finally:
        theirs.close()
        for descriptor in (*inherited, *ends):
            os.close(descriptor)
    ours.setblocking(False)
    handle = None
    if init is not None:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(init)
    return SandboxProcess(settings.kind, popen, ours, outputs, init, handle, folder)


def _options(control: socket.socket, folder: str, settings: SandboxSettings) -> list[str]:
    """Return the arguments of worker.py."""
    follow = "follow" if settings.kind is SandboxKind.NONE else "bwrap"
    limits = ",".join(f"{name}={value}" for name, value in settings.limits.items())
    return [str(control.fileno()), folder, str(settings.output_characters // 2), follow, limits, _TOKEN]


def _start_reaper(interpreter: Interpreter, user: int | None) -> "subprocess.Popen[bytes]":
    command = [str(interpreter.executable), "-I", "-S", "-c", _REAPER.read_text(), _TOKEN]
    return _popen(command, {}, user, [subprocess.DEVNULL], (), stdin=subprocess.PIPE)


def _popen(
    command: list[str],
    environment: dict[str, str] | None,
    user: int | None,
    outputs: list[int],
    inherited: tuple[int, ...],
    stdin: int = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    drop: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.Popen(
            command,
            env={} if environment is None else environment,
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


def _filter() -> bytes:
    machine = platform.machine()
    if machine not in seccomp.MACHINES:
        raise SandboxUnavailable(
            f"the sandbox has no list of system calls for {machine}, only for {', '.join(seccomp.MACHINES)}",
            "run the code interpreter on such a machine",
        )
    return seccomp.program(machine)


def _bounded_file(size: int) -> int:
    """Create a memory file limited to `size` bytes, rounded up to pages."""
    descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, -(-size // _PAGE) * _PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def _filled_file(content: bytes) -> int:
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_init(descriptor: int) -> int | None:
    """Return the process number that bwrap reports; None if it ended without one."""
    text = b""
    while piece := os.read(descriptor, 4096):
        text += piece
    return json.loads(text)["child-pid"] if text.strip() else None
