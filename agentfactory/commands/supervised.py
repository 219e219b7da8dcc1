"""A command in a child process: user code that ends its process does not end the command without a word."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from agentfactory.tools.processes.endings import ended_by

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 130
_SAME_SECONDS = 1.0
"""Signals of one kind within this time are forwarded once: `timeout` sends each one twice."""
_REACT_SECONDS = 5.0
"""Time after a signal from which a further one kills a child that has not reacted."""


class DiedFromInside(Exception):
    """The process of a command ended before the command returned; the message says how."""


def supervised(command: Callable[[], int]) -> int:
    """Run `command` in a forked child, and return its result in both processes. Call it before threads are started.

    The parent passes signals on to the child, which is killed with the parent. A further signal after some seconds
    kills the child: code that holds Python's lock reacts to none. Raises DiedFromInside, in the parent, if the child
    ends before `command` has returned.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return command()
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        os.close(reader)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != parent:
            os._exit(1)
        # names the line that crashed
        faulthandler.enable(all_threads=False)
        status = command()
        with suppress(BrokenPipeError):  # the parent is gone
            os.write(writer, b".")
        return status
    os.close(writer)
    status = _wait_for(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    returned = os.read(reader, 1)
    os.close(reader)
    if not returned:
        raise DiedFromInside(ended_by(status))
    # after its last word, the child may still get a signal
    return status if status >= 0 else _INTERRUPTED


def _wait_for(child: int) -> int:
    """Wait until the child has ended, and forward signals meanwhile. Return its exit status, or minus the signal that
    ended it."""
    forwarded: dict[int, float] = {}
    first = None
    while True:
        # the child may have ended before the signals were awaited
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        found = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if found.si_signo == signal.SIGCHLD:
            continue
        now = time.monotonic()
        first = now if first is None else first
        if now - first >= _REACT_SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            name = signal.Signals(found.si_signo).name
            raise DiedFromInside(
                f"still ran {now - first:.0f} s after a signal, and {name} killed it; user code that holds "
                "Python's lock reacts to no signal, such as a slow regular expression"
            )
        # a terminal sends Ctrl-C to the child too; such signals come from the kernel
        if found.si_code > 0:
            continue
        if now - forwarded.get(found.si_signo, -_SAME_SECONDS) >= _SAME_SECONDS:
            forwarded[found.si_signo] = now
            os.kill(child, found.si_signo)
