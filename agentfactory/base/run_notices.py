"""Notices and activities, for the user of a run, from any module. Notices are shown once in the terminal, counted, and
repeated at the end; a worker forwards its notices to rank 0 of the trainer (`launching.progress.tell_warnings`).
An activity that has lasted QUIET_SECONDS is shown after QUIET_SECONDS without other output."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar


@dataclass(frozen=True)
class Notice:
    """A notice: `topic` is its counter, `text` the event, `see` the page or log with details."""

    topic: str
    text: str
    see: str = ""
    times: int = 1
    """Number of occurrences; 0 if the text contains the count so far."""
    level: int = logging.WARNING
    """Log level; logging.INFO if there is no fault."""

    def __str__(self) -> str:
        return f"{self.text}; see {self.see}" if self.see else self.text


def notify(logger: logging.Logger, topic: str, text: str, *, see: str = "", times: int = 1) -> None:
    """Show the first notice on a `topic` to the user; repeat the last one at the end, with the sum of their `times`."""
    log(logger, Notice(topic, text, see, times))


def inform(logger: logging.Logger, text: str, *, see: str = "") -> None:
    """Show the user at the terminal information such as an address, immediately and only once."""
    log(logger, Notice("", text, see, level=logging.INFO))


def log(logger: logging.Logger, notice: Notice) -> None:
    """Log a notice, which passes it to the handlers of this process's notices."""
    # an agent's text may contain lone surrogates, which neither a terminal nor a socket accepts
    notice = replace(notice, text=notice.text.encode("utf-8", "replace").decode())
    logger.log(notice.level, "%s", notice, extra={"notice": notice})


def notice_of(record: logging.LogRecord) -> Notice | None:
    """Return the notice that `notify` put into this record; None for any other warning."""
    return getattr(record, "notice", None)


class Notices:
    def __init__(self) -> None:
        self._last: dict[str, Notice] = {}

    def take(self, notice: Notice) -> bool:
        """Count a notice. Return whether it is the first on its topic, which should be shown."""
        before = self._last.get(notice.topic)
        self._last[notice.topic] = replace(notice, times=notice.times + (before.times if before else 0))
        return before is None

    def last_lines(self) -> list[str]:
        lines = ((notice, f" ({notice.times} times)" if notice.times > 1 else "") for notice in self._last.values())
        return [f"{notice}{times}" for notice, times in lines]


# ---- activities

Part = TypeVar("Part")

QUIET_SECONDS = 6.0


@dataclass(eq=False)
class _Activity:
    describe: Callable[[float], str]
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.describe(time.monotonic() - self.began)


_activities: list[_Activity] = []


@contextmanager
def doing(what: str | Callable[[float], str]) -> Iterator[None]:
    """Declare what this process does in this context. A function gets its seconds so far, and runs in other threads."""
    activity = _Activity(what if callable(what) else lambda seconds: f"{what}, {seconds:.0f} s so far")
    _activities.append(activity)
    try:
        yield
    finally:
        _activities.remove(activity)


def counted(what: str, noun: str, parts: Sequence[Part]) -> Iterator[Part]:
    """Yield `parts`, and declare meanwhile how many of them are done."""
    done = 0
    with doing(lambda seconds: f"{what}: {done} of {len(parts)} {noun} done, {seconds:.0f} s so far"):
        for part in parts:
            yield part
            done += 1


def current(seconds: float = 0.0) -> str:
    """Return the innermost activity that has lasted `seconds`; empty if there is none."""
    # a copy, because the thread that acts may end its activity meanwhile
    return "".join(map(str, [one for one in [*_activities] if time.monotonic() - one.began >= seconds][-1:]))


@contextmanager
def heard(say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a `say` for all that this process tells the user, which after QUIET_SECONDS tells what the process does."""
    spoken, ended = time.monotonic(), threading.Event()

    def speak(text: str) -> None:
        nonlocal spoken
        spoken = time.monotonic()
        say(text)

    def beat() -> None:
        while not ended.wait(max(0.1, spoken + QUIET_SECONDS - time.monotonic())):
            if time.monotonic() >= spoken + QUIET_SECONDS and (text := current(QUIET_SECONDS)):
                try:
                    speak(text)
                except OSError:  # the reader of our output is gone: the next word of the command ends it
                    return

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
