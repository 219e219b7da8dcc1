"""Helpers to wait for a state, or to advance time without waiting, independent of the machine's speed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return the value of `condition` as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def settle() -> None:
    """Let the tasks of the running loop go on for some steps."""
    for _ in range(20):
        await asyncio.sleep(0)


def pass_time(seconds: float) -> None:
    """Set the running loop's clock forward; callbacks due by then run next."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
