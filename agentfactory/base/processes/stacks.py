"""Stacks of another process, written without Python's lock, which its code may hold."""

import contextlib
import ctypes
import faulthandler
import io
import os
import re
import signal
import time
from pathlib import Path

from agentfactory.base.user_code.places import Place, described, parsed_dump
from agentfactory.base.user_code.watch import BEAT_SECONDS

_DUMP_SECONDS = 0.2
_POLL_SECONDS = 0.02
_MEASURED_SECONDS = 0.3
_MOST_THREADS = 40


def show_stacks(writer: int) -> None:
    """Let the process at the other end of the pipe `writer` ask for the stacks of this one; see Inside."""
    if hasattr(signal, "SIGRTMIN"):
        faulthandler.register(_asked_by(), file=writer, all_threads=False)


class Inside:
    """What another process, which has called `show_stacks` and `watch.supervise` with the other end of the pipe
    `reader`, tells of itself."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        self._pipe = io.FileIO(reader)
        self._lines: list[str] = []
        self._stacks = ""

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def lines(self) -> list[str]:
        """Return the lines that `watch.tell` has sent since the last call."""
        self._read()
        lines, self._lines = self._lines, []
        return lines

    def beats(self) -> bool:
        """Wait for a beat of the process; return False if none comes, because its code holds Python's lock."""
        self._read()
        before = len(self._lines)
        until = time.monotonic() + 1.5 * BEAT_SECONDS
        while time.monotonic() < until:
            self._read()
            if len(self._lines) > before:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def place(self, main_only: bool = False) -> str | None:
        """Return the place in user code at which the process is: that of its busiest thread with user code, or with
        `main_only` of its main thread. None if there is none, or if it shows no stacks."""
        if not _shows_stacks(self.pid) or is_stopped(self.pid):
            return None
        threads = [self.pid]
        if not main_only:
            spent = _times(self.pid)
            time.sleep(_MEASURED_SECONDS)
            more = {thread: ticks - spent.get(thread, ticks) for thread, ticks in _times(self.pid).items()}
            threads = sorted(more, key=lambda thread: (-more[thread], thread))[:_MOST_THREADS]
        for thread in threads:
            if (found := described(self._stack(thread))) is not None:
                return found
        return None

    def _stack(self, thread: int) -> list[Place]:
        """Return the stack of one thread, the outermost place first; empty if it does not answer."""
        self._read()
        self._stacks = ""
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
        if tgkill is None:  # the C library is not glibc
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, _asked_by())
        elif tgkill(self.pid, thread, _asked_by()) != 0:
            return []
        until, length = time.monotonic() + _DUMP_SECONDS, 0
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self._read()
            if 0 < length == len(self._stacks):
                break
            length = len(self._stacks)
        return parsed_dump(self._stacks)

    def _read(self) -> None:
        text = ""
        # None: the pipe is empty; b"": the process has ended
        while piece := self._pipe.read(1 << 16):
            text += piece.decode(errors="replace")
        self._lines += re.findall(r"^@(.*)$", text, re.MULTILINE)
        # a line may come in the middle of a stack
        self._stacks += re.sub(r"\n@.*\n", "", text)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return _state(Path(f"/proc/{pid}/stat")) in ("T", "t")


def _asked_by() -> int:
    # a real-time signal, because programs use SIGUSR1 and SIGUSR2 themselves
    return int(signal.SIGRTMIN) + 9


def _shows_stacks(pid: int) -> bool:
    """Return whether the process catches the signal, which would end it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (_asked_by() - 1) & 1)


def _times(pid: int) -> dict[int, int]:
    """Return thread -> ticks of processor time that it has spent."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(fields[11]) + int(fields[12])
    return found


def _state(file: Path) -> str:
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
