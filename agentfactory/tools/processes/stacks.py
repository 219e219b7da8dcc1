"""Stacks of another process, written without Python's lock, which its code may hold."""

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from agentfactory.tools.user_code.places import Place, described, parsed_dump

_SECONDS_OF_A_DUMP = 0.2
_MEASURED_SECONDS = 0.3
_MOST_THREADS = 40


def show_stacks(writer: int) -> None:
    """Let the other end of the pipe `writer` ask for the stacks of this process, by `user_place`."""
    if hasattr(signal, "SIGRTMIN"):
        faulthandler.register(_asked_by(), file=writer, all_threads=False)


def user_place(pid: int, read: Callable[[], str], main_only: bool = False) -> str | None:
    """Return the place in user code at which a process is: that of its busiest thread with user code. None if there is
    none, or if the process shows no stacks. `read` returns what has arrived on its pipe.

    `main_only`: look at the main thread alone.
    """
    if not _shows_stacks(pid):
        return None
    spent = _times(pid)
    time.sleep(_MEASURED_SECONDS)
    more = {thread: time - spent.get(thread, time) for thread, time in _times(pid).items()}
    order = [pid] if main_only else sorted(more, key=lambda thread: (-more[thread], thread))[:_MOST_THREADS]
    for thread in order:
        found = described(_stack(pid, thread, read))
        if found is not None:
            return found
    return None


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


def _stack(pid: int, thread: int, read: Callable[[], str]) -> list[Place]:
    """Return the stack of one thread, the outermost place first; empty if it does not answer."""
    read()
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:  # the C library is another than glibc
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _asked_by())
    elif tgkill(pid, thread, _asked_by()) != 0:
        return []
    text, until = "", time.monotonic() + _SECONDS_OF_A_DUMP
    while time.monotonic() < until:
        time.sleep(0.02)
        new = read()
        if text and not new:
            break
        text += new
    return parsed_dump(text)


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
