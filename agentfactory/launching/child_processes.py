"""Child processes of the launcher: started with a log, watched, and ended together with their descendants."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from agentfactory.base.errors import short
from agentfactory.base.files.disk import refusal, writing
from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code import watch

POLL_SECONDS = 0.1
_LOOK_SECONDS = 5.0  # seconds between two looks for stopped processes
_TERM_SECONDS = 5.0
_FINISH_SECONDS = 600.0  # seconds to wait for a child that is finishing its work
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailed(Exception):
    """A child ended when it should not have, or with an error; the message names the child, the cause and the log."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; it unwinds everything, like Ctrl-C."""


@dataclass
class Child:
    """A running child. `explain` finds the cause of its exit in the log; `is_finishing` tells that it has work left."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    explain: Callable[[list[str]], str | None] | None = None
    is_finishing: Callable[[], bool] = lambda: False

    def failure(self) -> ChildFailed:
        status = self.process.returncode
        if status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        elif self.explain and (reason := self.explain(self.tail(1000))):
            how = f"ended with exit status {status}: {reason[:500]}"
        else:
            # the last line of a traceback, or the process's last message; torchrun's output ends with a ruler
            lines = (line.strip() for line in reversed(self.tail(40)) if any(map(str.isalnum, line)))
            how = ": ".join([f"ended with exit status {status}", *(line[:500] for line in islice(lines, 1))])
        if (refused := refusal(self.log.parent)) is not None and str(refused.strerror) not in how:
            how += f"; nothing more can be written in {self.log.parent}: {refused.strerror}; fix: make room"
        return ChildFailed(f"the {self.name} {how} (log: {self.log})")

    def tail(self, lines: int) -> list[str]:
        """Return the last lines that this child wrote to its log; a resumed run appends to an earlier attempt's log."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()[-lines:]


def start_child(
    name: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    show: bool = False,
    explain: Callable[[list[str]], str | None] | None = None,
    is_finishing: Callable[[], bool] = lambda: False,
    inherited: Mapping[str, str] = os.environ,
) -> Child:
    """Start a child, in its own session, whose output goes to `log`, or with `show` only its stderr."""
    with writing(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        log_start = file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if show else file,
            stderr=file,
            # threads that spin while they wait would take cores from the other processes
            env={"OMP_WAIT_POLICY": "passive", **inherited, **parent_watch.environment(), **(env or {})},
            start_new_session=True,
        )
    return Child(name, process, log, log_start, explain, is_finishing)


def end_child(child: Child, ends: Callable[[Child], bool]) -> None:
    """Send a child SIGTERM, and kill it unless it `ends`, and then the processes that are left."""
    descendants = _descendants(child)
    if child.process.poll() is None:
        child.process.terminate()
        if not ends(child):
            descendants += _descendants(child)
            child.process.kill()
            child.process.wait()
    psutil.wait_procs(descendants, timeout=1.0)
    _kill(descendants)


class Children:
    """The children of one command. Leaving the context ends them, in reverse order, with all their descendants, which
    on Linux are reparented to this process. `say` gets lines about stopped descendants."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._children: list[Child] = []
        self._hurried = False
        if self._say is not None:
            threading.Thread(target=self._watch, args=(self._say,), name="stopped processes", daemon=True).start()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # nohup makes SIGHUP ignored; keep it ignored
        wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, _terminated) for number in wanted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # a second signal must not leave anything behind: it shortens the wait for children that are finishing
        watch.tell("reacts")
        interrupt = signal.signal(signal.SIGINT, self._hurry)
        self._ended.set()
        for number in self._handlers:
            signal.signal(number, self._hurry)
        for child in reversed(self._children):
            self.stop(child)
        _kill(psutil.Process().children(recursive=True))
        for number, handler in {**self._handlers, signal.SIGINT: interrupt}.items():
            signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], log: Path, **options: Any) -> Child:
        child = start_child(name, command, log, **options)
        self._children.append(child)
        return child

    def wait(self, child: Child) -> None:
        """Wait until `child` ends successfully. Raises ChildFailed if it fails or another child ends first."""
        others = [other for other in self._children if other is not child]
        while child.process.poll() is None:
            self.check(*others)
            time.sleep(POLL_SECONDS)
        # if another child's end brought this one down, report the other as the cause
        self.check(*others)
        self._children.remove(child)
        if child.process.returncode != 0:
            raise child.failure()

    def check_all(self) -> None:
        self.check(*self._children)

    def check(self, *children: Child) -> None:
        """Raise ChildFailed if one of these children is not running."""
        for child in children:
            if child.process.poll() is not None:
                raise child.failure()

    def stop(self, child: Child) -> None:
        """End a child after 5 s; one that is finishing gets up to 10 minutes, unless a second signal arrives."""
        end_child(child, self._ends)
        if child in self._children:
            self._children.remove(child)

    def _ends(self, child: Child) -> bool:
        """Return whether a child exits in time after SIGTERM, or after it has finished its work."""
        started = finished = time.monotonic()
        while child.process.poll() is None:
            now = time.monotonic()
            if child.is_finishing():
                finished = now
            if now - started > _FINISH_SECONDS or now - (started if self._hurried else finished) > _TERM_SECONDS:
                return False
            time.sleep(POLL_SECONDS / 5)
        return True

    def _hurry(self, number: int, frame: FrameType | None) -> None:
        self._hurried = True

    def _watch(self, say: Callable[[str], None]) -> None:
        seen: dict[int, int] = {}  # process id -> consecutive looks at which it was stopped
        while not self._ended.wait(_LOOK_SECONDS):
            before, seen, names = seen, {}, dict[int, str]()
            for child in [*self._children]:
                names |= {below.pid: f"process {below.pid} of the {child.name}" for below in _descendants(child)}
                names[child.process.pid] = child.name
            for process in psutil.Process().children(recursive=True):
                pid = process.pid
                with suppress(psutil.NoSuchProcess):
                    name = names.get(pid) or f"process {pid} ({short(' '.join(process.cmdline()))})"
                    if process.status() == psutil.STATUS_STOPPED:
                        seen[pid] = before.get(pid, 0) + 1
                        if seen[pid] == 2:
                            say(f"the {name} is stopped by a signal, such as SIGSTOP; fix: kill -CONT {pid}")
                    elif before.get(pid, 0) >= 2:
                        say(f"the {name} continues")


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def _descendants(child: Child) -> list[psutil.Process]:
    try:
        return psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=1.0)
