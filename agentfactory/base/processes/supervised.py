"""A command in a child process, which its parent supervises: user code that ends the process, or holds Python's lock,
does not end or stop the command without a word."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable

from agentfactory.base.processes.endings import HOLDS_LOCK, Signalled, ended_by
from agentfactory.base.processes.stacks import Inside, is_stopped, show_stacks
from agentfactory.base.user_code import watch
from agentfactory.base.user_code.watch import QUIET_SECONDS, growing

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 1.0
_SAME_SECONDS = 1.0
"""Signals of one kind within this time are forwarded once: `timeout` sends each one twice."""
_REACT_SECONDS = 5.0
"""Time after a signal from which user code that has not reacted is killed."""
_LEAVE_SECONDS = 60.0
"""Time within which the process of a command that has returned must end."""


class DiedFromInside(Exception):
    """The process of a command ended before the command returned, or was killed; the message says why."""


_started_by: int | None = None


def starter() -> int:
    """Return the id of the process that started this command; it is not the one that supervises it."""
    return os.getppid() if _started_by is None else _started_by


def supervised(command: Callable[[], int]) -> int:
    """Run `command` in a forked child, and return its result in both processes. Call it before threads are started.

    The parent passes signals on to the child, which is killed with the parent. It tells the user of user code that
    holds Python's lock, and kills the child when such code reaches the limit of `watch.limited`, or does not react to a
    signal. Raises, in the parent, DiedFromInside if the child ends before `command` has returned, and Signalled if a
    signal that has arrived here has ended it.
    """
    if not hasattr(signal, "sigtimedwait"):
        return command()
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    global _started_by
    parent, _started_by = os.getpid(), os.getppid()
    # nohup makes SIGHUP ignored; a blocked signal would arrive nevertheless
    awaited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        os.close(reader)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != parent:
            os._exit(1)
        # names the line that crashed
        faulthandler.enable(all_threads=False)
        show_stacks(writer)
        watch.supervise(writer)
        status = command()
        watch.tell("returned", status)
        return status
    os.close(writer)
    supervisor = _Supervisor(child, reader)
    status = supervisor.wait(awaited)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    supervisor.hear()
    if supervisor.returned is None and -status in supervisor.received:
        # before or after the command has handlers of its own
        raise Signalled(-status)
    if supervisor.returned is None:
        raise DiedFromInside(ended_by(status, supervisor.doing))
    # after its last word, the child may still get a signal, or end otherwise
    return supervisor.returned


class _Supervisor:
    """The parent's view of the child, which sends lines that begin with @ through a pipe, and its stacks."""

    def __init__(self, child: int, reader: int) -> None:
        self.returned: int | None = None
        """The status that the command has returned."""
        self.doing = ""
        """The user code that the child executes, such as `importing tools.py`, if it is known."""
        self.received: dict[int, float] = {}
        """Signal -> time at which it arrived last."""
        self._child = child
        self._inside = Inside(child, reader)
        self._limit: tuple[float, str] | None = None
        self._reacts = False
        self._silent = 0.0
        """Seconds without a beat, counted while the child could have sent one."""
        self._due = QUIET_SECONDS
        self._leaving = 0.0
        self._first: float | None = None
        """Time of the first signal."""

    def wait(self, awaited: set[signal.Signals]) -> int:
        """Wait until the child has ended, and forward the signals `awaited` meanwhile. Return its exit status, or minus
        the signal that ended it. Raises DiedFromInside if it had to be killed."""
        looked = time.monotonic()
        while True:
            # the child may have ended before the signals were awaited
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            found = signal.sigtimedwait(awaited, _TICK_SECONDS)
            now = time.monotonic()
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._pass_on(found, now)
            if now - looked >= _TICK_SECONDS / 2:
                # this process may itself have been stopped, or the machine asleep
                self._look(min(now - looked, 2 * _TICK_SECONDS), now)
                looked = now

    def hear(self) -> None:
        """Take the lines that the child has sent."""
        for line in self._inside.lines():
            kind, _, value = line.partition(" ")
            self._silent = 0.0
            match kind:
                case "limit":
                    seconds, _, setting = value.partition(" ")
                    self._limit = (float(seconds), setting) if value else None
                case "doing":
                    self.doing = value
                case "reacts":
                    self._reacts = True
                case "returned":
                    self.returned = int(value)
                case "stuck":
                    self._end(f"was killed: {value}; fix: {watch.BLOCKS_LOOP}")

    def _pass_on(self, found: signal.struct_siginfo, now: float) -> None:
        self._first = now if self._first is None else self._first
        if now - self._first >= _REACT_SECONDS and not self._reacts:
            name = signal.Signals(found.si_signo).name
            where = self._inside.place()
            code = "user code that holds Python's lock reacts to no signal, such as a slow regular expression"
            self._end(f"still ran {now - self._first:.0f} s after a signal, and {name} killed it; {where or code}")
        before, self.received[found.si_signo] = self.received.get(found.si_signo, -_SAME_SECONDS), now
        # a terminal sends Ctrl-C to the child too; such signals come from the kernel
        if found.si_code <= 0 and now - before >= _SAME_SECONDS:
            os.kill(self._child, found.si_signo)

    def _look(self, seconds: float, now: float) -> None:
        self._silent += seconds
        self.hear()
        if is_stopped(self._child):
            self._silent = 0.0
            return
        if self.returned is not None:
            self._look_at_leaving(seconds)
            return
        if self._first is not None and now - self._first >= _REACT_SECONDS and not self._reacts:
            holds = not self._inside.beats()
            if (where := self._inside.place(main_only=not holds)) is not None:
                fix = HOLDS_LOCK if holds else "let KeyboardInterrupt end it, and handle no SIGTERM and SIGINT in it"
                self._end(f"was killed, because user code did not react to a signal: {where}; fix: {fix}")
        if self._limit is not None and self._silent > max(self._limit[0], QUIET_SECONDS):
            where = self._inside.place() or "user code"
            # it may have come back while this process looked
            self.hear()
            if self._silent:
                held = f"{where}, held Python's lock for longer than {self._limit[1]}"
                self._end(f"was killed, because nothing else in it could run: {held}; fix: {HOLDS_LOCK}")
        if self._silent >= self._due:
            where = self._inside.place()
            self.hear()
            if where is not None and self._silent:
                watch.say(
                    f"{where}, has held Python's lock for {self._silent:.0f} s, and nothing else in this process can "
                    f"run; fix: {HOLDS_LOCK}"
                )
            self._due = growing(self._due)
        elif self._silent < QUIET_SECONDS:
            self._due = QUIET_SECONDS

    def _look_at_leaving(self, seconds: float) -> None:
        """Tell the user of user code that keeps a command from ending, and kill it in the end."""
        before, self._leaving = self._leaving, self._leaving + seconds
        if before < QUIET_SECONDS <= self._leaving:
            where = self._inside.place()
            watch.say(f"the command is done, and its process has not ended: {where or 'it is shutting down'}")
        if self._leaving >= _LEAVE_SECONDS:
            watch.say(f"its process was killed {_LEAVE_SECONDS:g} s after the command was done")
            os.kill(self._child, signal.SIGKILL)

    def _end(self, why: str) -> None:
        """Kill the child, and raise DiedFromInside."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        raise DiedFromInside(why)
