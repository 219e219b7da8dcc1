"""Signals to commands on an event loop."""

import asyncio
import os
import signal

import pytest

from agentfactory.tools.processes.interrupts import run_interruptible


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, ""), (signal.SIGTERM, "SIGTERM")])
def test_a_second_signal_does_not_abandon_the_end_of_the_first(number: signal.Signals, name: str) -> None:
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            ended.append(True)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the handler of before"))
    try:
        with pytest.raises(KeyboardInterrupt, match=f"^{name}$"):
            run_interruptible(work())
    finally:
        signal.signal(signal.SIGTERM, before[1])
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) == before[0]


def test_what_the_work_returns_or_raises() -> None:
    async def work(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 3

    assert run_interruptible(work(None)) == 3
    with pytest.raises(ValueError, match="mine"):
        run_interruptible(work(ValueError("mine")))
