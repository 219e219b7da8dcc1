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

_SAME_SECONDS = 1.0
"""A terminal sends Ctrl-C to a command's process and to its parent, which forwards it within this time."""


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` like `asyncio.run`. A signal cancels it, and its own handler is called after the clean-up: inside the
    loop, KeyboardInterrupt can lose a wake-up."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)  # signals are handled in the main thread
    found = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    first: tuple[int, float] | None = None  # signal, time

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def hear(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if first is None:
                first = number, time.monotonic()
                with suppress(RuntimeError):  # the loop was just closed
                    loop.call_soon_threadsafe(task.cancel)
            elif time.monotonic() - first[1] >= _SAME_SECONDS:
                handlers[number](number, frame)

        for number in handlers:
            signal.signal(number, hear)
        return await main

    try:
        return asyncio.run(cancellable())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if first is not None:
            handlers[first[0]](first[0], None)
