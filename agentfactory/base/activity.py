"""What this process is doing, for a user who has read nothing for some seconds."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Part = TypeVar("Part")

QUIET_SECONDS = 6.0


@dataclass(eq=False)
class _Activity:
    """An activity, which describes itself with the seconds since it began."""

    describe: Callable[[float], str]
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.describe(time.monotonic() - self.began)


_activities: list[_Activity] = []


@contextmanager
def doing(what: str | Callable[[float], str]) -> Iterator[None]:
    """Declare what this process does in this context; the innermost one is shown. A function gets its seconds so far,
    and is called in other threads."""
    activity = _Activity(what if callable(what) else lambda seconds: f"{what}, {seconds:.0f} s so far")
    _activities.append(activity)
    try:
        yield
    finally:
        _activities.remove(activity)


def counted(what: str, parts: Sequence[Part]) -> Iterator[Part]:
    """Yield `parts`, and declare meanwhile how many of them are done."""
    done = 0
    with doing(lambda seconds: f"{what}: {done} of {len(parts)} micro-batches done, {seconds:.0f} s so far"):
        for part in parts:
            yield part
            done += 1


def current() -> str:
    """Return what this process is doing; empty if nothing was declared."""
    return str(_activities[-1]) if _activities else ""


@contextmanager
def heard(say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a `say` for everything that this process tells the user. After QUIET_SECONDS without a word, it tells by
    itself what the process is doing."""
    spoken, ended = time.monotonic(), threading.Event()

    def speak(text: str) -> None:
        nonlocal spoken
        spoken = time.monotonic()
        say(text)

    def beat() -> None:
        while not ended.wait(max(0.1, spoken + QUIET_SECONDS - time.monotonic())):
            if time.monotonic() >= spoken + QUIET_SECONDS and (text := current()):
                speak(text)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield speak
    finally:
        ended.set()
        thread.join()


def clock(seconds: float) -> str:
    """Format a duration with two digits."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
