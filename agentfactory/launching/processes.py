"""Child processes of the launcher: started with a log, watched, and ended with all that they started."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import psutil

from agentfactory.tools import parent_watch

POLL_SECONDS = 0.1
_TERM_SECONDS = 5.0
_FINISH_SECONDS = 600.0
"""How long a child that finishes something is waited for."""
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailed(Exception):
    """A child ended that should not have, or ended badly; the message says which, how, and where its log is."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came; like Ctrl-C it unwinds everything."""


@dataclass
class Child:
    """A running child; `name` is what people call it, `log` the file that it writes to, from byte `log_start` on,
    `explain` finds in the log's last lines why it ended, or None, and `is_finishing` tells whether it needs longer than
    others to end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    explain: Callable[[list[str]], str | None] | None = None
    is_finishing: Callable[[], bool] = lambda: False

    def failure(self) -> ChildFailed:
        """How this child, which has ended, ended."""
        status = self.process.returncode
        if status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        elif self.explain and (reason := self.explain(self.tail(1000))):
            how = f"ended with exit status {status}: {reason[:500]}"
        else:
            # the last line of a traceback, or what the process said before it left; torchrun ends with a ruler
            lines = (line.strip() for line in reversed(self.tail(40)) if any(map(str.isalnum, line)))
            how = ": ".join([f"ended with exit status {status}", *(line[:500] for line in islice(lines, 1))])
        return ChildFailed(f"the {self.name} {how} (log: {self.log})")

    def tail(self, lines: int) -> list[str]:
        """The last lines that this child wrote to its log: a resumed run goes on with the log of an earlier attempt."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()[-lines:]


class Children:
    """The children of one command. Leaving the context ends them and all their descendants.

    A terminal's Ctrl-C reaches only this process, which then ends the others in order: each child leads a session of
    its own. Descendants whose parent died come to this process, so that they are found (Linux); children of ours also
    end by themselves when this process is killed (`agentfactory.tools.parent_watch`).
    """

    def __enter__(self) -> Self:
        self._children: list[Child] = []
        self._hurried = False
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # nohup has SIGHUP ignored, and it stays so
        wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, _terminated) for number in wanted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # a second signal must not leave anything behind: what would be waited for is ended at once
        interrupt = signal.signal(signal.SIGINT, self._hurry)
        for number in self._handlers:
            signal.signal(number, self._hurry)
        for child in reversed(self._children):
            self.stop(child)
        _kill(psutil.Process().children(recursive=True))
        for number, handler in {**self._handlers, signal.SIGINT: interrupt}.items():
            signal.signal(number, handler)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        show: bool = False,
        explain: Callable[[list[str]], str | None] | None = None,
        is_finishing: Callable[[], bool] = lambda: False,
    ) -> Child:
        """Start a child; its output goes to `log`, with `show` only what it writes to stderr. `explain` and
        `is_finishing`: see Child."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            log_start = file.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if show else file,
                stderr=file,
                # waiting threads that spin would take the cores from the other processes
                env={"OMP_WAIT_POLICY": "passive", **os.environ, **parent_watch.environment(), **(env or {})},
                start_new_session=True,
            )
        child = Child(name, process, log, log_start, explain, is_finishing)
        self._children.append(child)
        return child

    def wait(self, child: Child) -> None:
        """Wait until `child` ends well. Raises ChildFailed when it ends badly, or another child ends first."""
        while child.process.poll() is None:
            self.check(*(other for other in self._children if other is not child))
            time.sleep(POLL_SECONDS)
        # what another one's death brought down is not the cause
        self.check(*(other for other in self._children if other is not child))
        self._children.remove(child)
        if child.process.returncode != 0:
            raise child.failure()

    def check(self, *children: Child) -> None:
        """Raise ChildFailed if one of these, which should run, does not."""
        for child in children:
            if child.process.poll() is not None:
                raise child.failure()

    def stop(self, child: Child) -> None:
        """End a child: SIGTERM, which it passes on in its own order; what is left after 5 s is killed, unless it is
        finishing something: then after ten minutes, or when a second signal comes."""
        descendants = _descendants(child)
        if child.process.poll() is None:
            child.process.terminate()
            if not self._ends(child):
                descendants += _descendants(child)
                child.process.kill()
                child.process.wait()
        psutil.wait_procs(descendants, timeout=1.0)
        _kill(descendants)
        if child in self._children:
            self._children.remove(child)

    def _ends(self, child: Child) -> bool:
        """Whether a child that was told to end does so in its time. It begins anew when the child has finished what it
        was at: its interpreter has yet to end."""
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


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def _descendants(child: Child) -> list[psutil.Process]:
    try:
        return psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=1.0)
