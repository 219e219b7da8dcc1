"""Ctrl-C and SIGTERM for commands on an event loop."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` like asyncio.run; SIGINT or SIGTERM cancels it, and raises KeyboardInterrupt when it has ended.

    Further signals are ignored meanwhile. asyncio.run would abandon `work` at the second one, cancel the tasks that
    close tools, and wait for others that wait for these.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    heard: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def hear(number: signal.Signals) -> None:
            heard.append(number)
            if len(heard) == 1:
                task.cancel()

        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                loop.add_signal_handler(number, hear, number)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not heard:
            raise
        raise KeyboardInterrupt(*([] if heard[0] == signal.SIGINT else [heard[0].name])) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
