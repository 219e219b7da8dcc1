"""A fork server for our commands: a process that has already imported everything forks one process per command.

The forked process runs the command's `main` with its own arguments, environment and output, as `python -m` would."""

import importlib
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from agentfactory.base.processes import parent_watch

IMPORTED = [
    *("accelerate", "aiohttp.web", "peft", "torch", "transformers", "trl.chat_template_utils"),
    *(
        "agentfactory.commands.main",
        "agentfactory.launching.launcher",
        "agentfactory.rollout.workers.worker_socket",
        "agentfactory.rollout.text.load_renderer",
        "agentfactory.rollout.inference.embedded.embedded_server",
    ),
    *(
        "agentfactory.trainers.checkpoints.checkpoint",
        "agentfactory.trainers.loop.rl",
        "agentfactory.trainers.loop.sft",
        "agentfactory.trainers.sync.proven_push",
    ),
    # the tests' own main module, which multiprocessing imports in each process
    "pytest",
]
COMMAND = "agentfactory.commands.main"
ENGINE, TRAINER = "agentfactory.rollout.inference.embedded.__main__", "agentfactory.train"
READY_WITHIN = 120.0
"""Seconds that an engine may take to start."""

_PATH = [*sys.path]
"""Python's import path before any test: user code that tests load adds folders to it."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED)


class Forked:
    """A running command, similar to subprocess.Popen. `log` gets its output, stderr goes there or to `errors`, `typed`
    is its standard input, `open_files` limits its open files, and `environment` is added to ours."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        log: Path,
        errors: Path | None = None,
        typed: Path | None = None,
        open_files: int | None = None,
        **environment: str,
    ):
        self.log = log
        known = {**os.environ, **parent_watch.environment(), "OMP_NUM_THREADS": "1", **environment}
        command = (program, arguments, known, os.getcwd(), _PATH, (log, errors or log), typed, open_files)
        # audit hooks would see only the fork server start it, so report the start here
        sys.audit("subprocess.Popen", program, arguments)
        self._process = _context.Process(target=_run, args=command)
        self._process.start()
        # without the lock, two concurrent threads could take each other's answers
        self._asking = threading.Lock()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, wait for the process to end, and return its exit status."""
        if self.is_running():
            # it may end in between
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit status as subprocess does: negative for a signal."""
        while self.is_running():
            time.sleep(0.01)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def is_running(self) -> bool:
        with self._asking:
            return self._process.is_alive()


def _run(
    program: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
    path: list[str],
    outputs: tuple[Path, Path],
    typed: Path | None,
    open_files: int | None,
) -> None:
    os.setsid()
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    os.chdir(folder)
    # multiprocessing has given it the tests' own
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    # the fork server's imports have already chosen one, from other variables
    tempfile.tempdir = None
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if typed is not None:
        # multiprocessing has put another in its place
        os.dup2(os.open(typed, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
    importlib.import_module("torch").set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the default, as in any command
    sys.argv = [program, *arguments]
    status = importlib.import_module(program).main()
    sys.stdout.flush()
    sys.stderr.flush()
    # without the interpreter's own end, which gloo's threads can turn into an abort
    os._exit(status or 0)


def reserved_port() -> int:
    """A port that the kernel gives to nobody else for a minute, and on which a server can listen: a connection of it
    is in TIME_WAIT."""
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        client.connect(listening.getsockname())
        # the side that closes first enters TIME_WAIT
        listening.accept()[0].close()
        return listening.getsockname()[1]


def start_ranks(
    program: str, *arguments: str, log: Path, strategy: str, count: int = 2, machines: int = 1
) -> list[Forked]:
    """Start the ranks of a command on the CPU, with the environment that accelerate's launchers on `machines` (all
    of which are this one) give each."""
    local = count // machines
    given = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "true",
    }
    given |= {"MASTER_PORT": str(reserved_port())}
    given |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if strategy in ("fsdp2", "hsdp") else {}
    if machines > 1:
        # otherwise gloo would listen to the network, as it must between machines
        given["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        Forked(program, *arguments, log=log, RANK=str(rank), LOCAL_RANK=str(rank % local), **given)
        for rank in range(count)
    ]


def start_engine(model: Path, *flags: str, log: Path, **environment: str) -> tuple[Forked, str]:
    """Start an embedded engine on `model`; return it with its address once it is ready. The log may be an earlier
    engine's."""
    said = len(log.read_text()) if log.exists() else 0
    engine = Forked(ENGINE, str(model), "--port", "0", *flags, log=log, **environment)
    deadline = time.monotonic() + READY_WITHIN
    while True:
        text = log.read_text()[said:] if log.exists() else ""
        if ready := re.search(r"^ready (\S+)\n", text, re.MULTILINE):
            return engine, ready[1]
        assert engine.is_running(), text
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
