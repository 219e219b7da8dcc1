"""Tests of signals that arrive while a command's coroutine runs."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from agentfactory.base.processes import interruption
from agentfactory.base.processes.interruption import run_interruptibly


def end(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert all(signal.getsignal(number) is end for number in before)
    for number, handler in before.items():
        signal.signal(number, handler)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_cancels_the_coroutine_and_is_then_handled(number: signal.Signals, times: int) -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            for _ in range(times):  # a terminal's Ctrl-C arrives twice
                kill(number)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0.01)
            seen.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt, match=number.name):
        run_interruptibly(wait())
    assert seen == ["cancelled", "cleaned up"]


def test_a_signal_that_comes_as_the_coroutine_returns_is_handled() -> None:
    async def go() -> int:
        kill(signal.SIGTERM)
        return 5

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_interruptibly(go())


def test_a_further_signal_ends_a_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_SAME_SECONDS", 0.05)

    async def linger() -> None:
        try:
            kill(signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            asyncio.get_running_loop().call_later(0.1, kill, signal.SIGTERM)
            await asyncio.sleep(60)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(linger())
    assert time.monotonic() - begun < 30
