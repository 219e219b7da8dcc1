"""Coroutines of commands, which a signal cancels."""

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 1.0
"""A terminal sends Ctrl-C to a command's process and to its parent, which forwards it: signals within this time after
the first are the same."""
BLOCKED_SECONDS = 2.0
"""Time for the event loop to react to a signal."""


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` like `asyncio.run`. A signal cancels it, and after its clean-up the signal's own handler is called.

    The handlers of commands raise KeyboardInterrupt. Inside the event loop that can lose the wake-up of a task, for
    which the loop then waits forever. So a handler is called there only if code blocks the loop, or for a further
    signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)  # signals are handled in the main thread
    interruption = _Interruption()
    interruption.install()
    try:
        return asyncio.run(interruption.watch(main))
    finally:
        interruption.uninstall()


class _Interruption:
    """The signals that arrive while a coroutine runs."""

    def __init__(self) -> None:
        found = {int(number): signal.getsignal(number) for number in _SIGNALS}
        self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._first: tuple[int, float] | None = None  # signal, time
        self._heard, self._reacted = threading.Event(), threading.Event()

    def install(self) -> None:
        """Take over the signals that have a handler."""
        for number in self._handlers:
            signal.signal(number, self._hear)
        # started here, because a handler may interrupt another start of a thread
        threading.Thread(target=self._interrupt_if_blocked, name="interruption", daemon=True).start()

    def uninstall(self) -> None:
        """Restore the handlers, and call that of the first signal."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._reacted.set()
        self._heard.set()
        if self._first is not None:
            self._handlers[self._first[0]](self._first[0], None)

    async def watch(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in this task, which signals cancel from now on."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._first is not None:
            self._cancel()
        return await main

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self._heard.set()
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop was just closed
                    self._loop.call_soon_threadsafe(self._cancel)
        elif now - self._first[1] >= _SAME_SECONDS:
            self._handlers[number](number, frame)

    def _cancel(self) -> None:
        self._reacted.set()
        assert self._task is not None
        self._task.cancel()

    def _interrupt_if_blocked(self) -> None:
        self._heard.wait()
        if not self._reacted.wait(BLOCKED_SECONDS) and self._first is not None:
            # a real signal, which also ends a system call
            signal.pthread_kill(threading.main_thread().ident or 0, self._first[0])
