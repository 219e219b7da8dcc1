"""A command in a supervised child process, so that user code that ends it, or holds Python's lock, is reported."""

import contextlib
import ctypes
import faulthandler
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from agentfactory.base.user_code import watch
from agentfactory.base.user_code.watch import BEAT_SECONDS, QUIET_SECONDS, described, is_ours, parsed_dump, place_of

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK_SECONDS = 1.0
_SAME_SECONDS = 1.0
"""Signals of one kind within this time are forwarded once: `timeout` sends each one twice."""
_REACT_SECONDS = 5.0
"""Time after a signal from which user code that has not reacted is killed."""
_LEAVE_SECONDS = 60.0
"""Time within which the process of a command that has returned must end."""
_POLL_SECONDS = 0.02
_LEFT_SECONDS = 2.0
"""Time for processes that user code has left to end by themselves, and again after SIGTERM."""
_MOST_THREADS = 40
_SHOWN = 500

_APART = "start the tool as a process of its own by mcp_servers.NAME.command"
HOLDS_LOCK = f"end it sooner, such as by a simpler regular expression, or {_APART}, which limits can end"
_ENDS = f"correct the tool, environment, reward or agent that did it, or {_APART}"


class DiedFromInside(Exception):
    """The process of a command ended before the command returned, or was killed; the message says why."""


class Signalled(KeyboardInterrupt):
    """A signal that ends this process with `status`. User code that it interrupts is not to blame for it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def exited_by(error: SystemExit) -> str | None:
    """Describe the user code that has called sys.exit; None if our own has."""
    stack = [place_of(*each) for each in traceback.walk_tb(error.__traceback__)]
    where = described(stack)
    # a library may call it for the user
    if where is None or is_ours(stack[-1].file):
        return None
    return f"user code called sys.exit({error.code!r}) ({where}); fix: raise an exception instead"


def ended_by(status: int, doing: str = "", raised: str = "") -> str:
    """Describe the unexpected end of a process that runs user code, with a fix: its exit status or minus the signal,
    the user code that it executed (`doing`), and the exception that ended it, if known."""
    during = f" while {doing}" if doing else ""
    if raised:
        fix = "free memory" if raised.startswith("MemoryError") else "correct the code that its traceback names"
        return f"was ended by {raised}{during}, which nothing caught; fix: {fix}"
    if status >= 0:
        return f"ended with status {status}{during}, as by os._exit in user code; fix: {_ENDS}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
    cause, fix = "a crash in user code", _ENDS
    if -status == signal.SIGKILL:
        cause, fix = "the kernel when memory runs out", f"free memory, or {_ENDS}"
    return f"was killed by signal {-status} ({name}){during}, as by {cause}; fix: {fix}"


def show_to(writer: int) -> None:
    """Let the process at the other end of the pipe `writer` see what this one does (`Inside`)."""
    watch.supervise(writer)
    if hasattr(signal, "SIGRTMIN"):
        faulthandler.register(_asking(), file=writer, all_threads=False)
        watch.tell("shows")


def _asking() -> int:
    # a real-time signal, because programs use SIGUSR1 and SIGUSR2 themselves
    return int(signal.SIGRTMIN) + 9


class Inside:
    """The view of another process, which has called `show_to` with the other end of the pipe `reader`: the lines of
    `watch.tell`, and its stacks, which `faulthandler` writes at a signal without Python's lock."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        self._pipe = io.FileIO(reader)
        self._lines: list[str] = []
        self._dump = ""
        self._shows = False
        self._spent = 0.0  # CPU seconds at the last call of `had`

    def close(self) -> None:
        self._pipe.close()

    def lines(self) -> list[str]:
        self._read()
        lines, self._lines = self._lines, []
        return lines

    def beats(self) -> bool:
        """Wait for a beat of the process; return False if none comes, because its code holds Python's lock."""
        self._read()
        before, until = len(self._lines), time.monotonic() + 1.5 * BEAT_SECONDS
        while len(self._lines) == before and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self._read()
        return len(self._lines) > before

    def is_stopped(self) -> bool:
        import psutil  # here, because every command imports this module

        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def had(self, seconds: float) -> float:
        """Return how many of the last `seconds` the process ran or slept, and did not wait for a processor or disk."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            before, self._spent = self._spent, sum(process.cpu_times()[:2])
            if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                return min(seconds, self._spent - before)
        return seconds

    def place_at_end(self) -> str | None:
        """Return the place in user code that keeps a process from its end: no daemon thread does."""
        stack = [(place.file, place.function) for place in self._stack_of(self.pid)]
        return self.place(main_only=(threading.__file__, "_shutdown") not in stack)

    def place(self, main_only: bool = False) -> str | None:
        """Return the place in user code at which the process is: that of its busiest thread with user code, or with
        `main_only` of its main thread. None if there is none, or if it shows no stacks."""
        self._read()
        if not self._shows or self.is_stopped():
            return None
        threads = [self.pid]
        if not main_only:
            spent = self._times()
            time.sleep(0.3)  # then compare the threads' CPU times
            more = {thread: seconds - spent.get(thread, seconds) for thread, seconds in self._times().items()}
            threads = sorted(more, key=lambda thread: (-more[thread], thread))[:_MOST_THREADS]
        return next(filter(None, map(described, map(self._stack_of, threads))), None)

    def _times(self) -> dict[int, float]:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return {each.id: each.user_time + each.system_time for each in psutil.Process(self.pid).threads()}
        return {}

    def _stack_of(self, thread: int) -> list[watch.Place]:
        """Return the stack of a thread; an empty one if it does not answer."""
        if not self._shows:
            return []
        self._dump, libc = "", ctypes.CDLL(None)
        # older C libraries can only ask the main thread
        ask = getattr(libc, "tgkill", lambda pid, thread, number: libc.kill(pid, number))
        if ask(self.pid, thread, _asking()) != 0:
            return []
        until, length = time.monotonic() + 0.2, 0  # a dump takes less
        while time.monotonic() < until and not 0 < length == len(self._dump):
            length = len(self._dump)
            time.sleep(_POLL_SECONDS)
            self._read()
        return parsed_dump(self._dump)

    def _read(self) -> None:
        text = ""
        # None: the pipe is empty; b"": the process has ended
        while piece := self._pipe.read(1 << 16):
            text += piece.decode(errors="replace")
        lines = re.findall(r"^@(.*)$", text, re.MULTILINE)
        self._shows = self._shows or "shows" in lines
        self._lines += lines
        # a line may come in the middle of a stack
        self._dump += re.sub(r"\n@.*\n", "", text)


_started_by: int | None = None


def starter() -> int:
    """Return the id of the process that started this command; it is not the one that supervises it."""
    return os.getppid() if _started_by is None else _started_by


def supervised(command: Callable[[], int]) -> int:
    """Run `command` in a forked child, and return its result in both processes. Call it before threads are started. The
    parent passes signals on, tells the user of user code that holds Python's lock, and kills the child when such code
    reaches the limit of `watch.limited`, or does not react to a signal; at the end it ends the processes that user code
    has left in its session. The child is killed with the parent. Raises, in the parent, DiedFromInside if the child
    ends before `command` has returned, and Signalled if a signal that has arrived here has ended it."""
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
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        os.close(reader)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != parent:
            os._exit(1)
        # names the line that crashed
        faulthandler.enable(all_threads=False)
        show_to(writer)
        try:
            status = command()
        except Exception as error:
            watch.tell("raised", *traceback.format_exception_only(error)[-1][:_SHOWN].split())
            raise
        watch.tell("returned", status)
        return status
    os.close(writer)
    supervisor = _Supervisor(child, reader)
    try:
        status = supervisor.wait(awaited)
        supervisor.hear()
    finally:
        _end_left()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if supervisor.returned is not None:
        # after its last word, the child may still get a signal, or end otherwise
        return supervisor.returned
    if -status in supervisor.received:  # before or after the command has handlers of its own
        raise Signalled(-status)
    raise DiedFromInside(ended_by(status, supervisor.doing, supervisor.raised))


def _end_left() -> None:
    """End the processes of this session that user code has left; one that is to stay begins a session of its own."""
    with contextlib.suppress(ChildProcessError):  # there is none
        os.waitpid(-1, os.WNOHANG)
        import psutil

        left = [each for each in psutil.Process().children(recursive=True) if _session(each.pid) == os.getsid(0)]
        _, left = psutil.wait_procs(left, _LEFT_SECONDS)
        if left:
            watch.say(f"processes that user code has left are ended: {', '.join(str(each.pid) for each in left)}")
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            _, left = psutil.wait_procs(left, _LEFT_SECONDS)


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


class _Supervisor:
    """The parent's view of the child, which sends lines that begin with @ through a pipe, and its stacks."""

    def __init__(self, child: int, reader: int) -> None:
        self.returned: int | None = None
        self.doing = ""
        self.raised = ""
        self.received: dict[int, float] = {}
        """Signal -> time at which it arrived last."""
        self._child = child
        self._inside = Inside(child, reader)
        self._limit: tuple[float, str] | None = None
        self._reacts = False
        self._silent = 0.0  # seconds without a beat, while the child could have sent one
        self._due = QUIET_SECONDS
        self._leaving = 0.0
        self._first: float | None = None  # time of the first signal

    def wait(self, awaited: set[signal.Signals]) -> int:
        """Wait until the child has ended, and forward the signals `awaited` meanwhile. Return its exit status, or minus
        the signal that ended it. Raises DiedFromInside if it had to be killed."""
        looked = time.monotonic()
        while True:
            # the child may have ended before the signals were awaited; others are processes that it has left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    return os.waitstatus_to_exitcode(ended[1])
            found = signal.sigtimedwait(awaited, _TICK_SECONDS)
            now = time.monotonic()
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._pass_on(found, now)
            if now - looked >= _TICK_SECONDS / 2:
                # this process may itself have been stopped, or the machine asleep
                self._look(min(now - looked, 2 * _TICK_SECONDS), now)
                looked = now

    def hear(self) -> None:
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
                case "raised":
                    self.raised = value
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
        seconds = self._inside.had(seconds)
        self._silent += seconds
        self.hear()
        if self._inside.is_stopped():
            self._silent = 0.0
            return
        if self.returned is not None:
            before, self._leaving = self._leaving, self._leaving + seconds
            # without user code, it unloads libraries
            if before < QUIET_SECONDS <= self._leaving and (where := self._inside.place_at_end()) is not None:
                watch.say(f"the command is done, and its process has not ended: {where}")
            if self._leaving >= _LEAVE_SECONDS:
                watch.say(f"its process was killed {_LEAVE_SECONDS:g} s after the command was done")
                os.kill(self._child, signal.SIGKILL)
            return
        if self._first is not None and now - self._first >= _REACT_SECONDS and not self._reacts:
            holds = not self._inside.beats()
            if (where := self._inside.place(main_only=not holds)) is not None:
                fix = HOLDS_LOCK if holds else "let KeyboardInterrupt end it, and handle no SIGTERM and SIGINT in it"
                self._end(f"was killed, because user code did not react to a signal: {where}; fix: {fix}")
        is_over = self._limit is not None and self._silent > max(self._limit[0], QUIET_SECONDS)
        if is_over or self._silent >= self._due:
            where = self._inside.place()
            # it may have come back while this process looked
            self.hear()
            if self._silent and is_over and self._limit is not None:
                held = f"{where or 'user code'}, held Python's lock for longer than {self._limit[1]}"
                self._end(f"was killed, because nothing else in it could run: {held}; fix: {HOLDS_LOCK}")
            if self._silent and where is not None:
                held = f"{where}, has held Python's lock for {self._silent:.0f} s"
                watch.say(f"{held}, and nothing else in this process can run; fix: {HOLDS_LOCK}")
            self._due *= 3
        elif self._silent < QUIET_SECONDS:
            self._due = QUIET_SECONDS

    def _end(self, why: str) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        raise DiedFromInside(why)
