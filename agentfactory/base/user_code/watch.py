"""A watch over users' code in this process. It names what takes long, and what blocks an event loop.

A thread looks at what is watched, and ends when there is nothing left. It cannot run while code holds Python's lock; a
supervising process sees that by the beats that are missing (`agentfactory.base.processes.supervised`).
"""

import asyncio
import inspect
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType

from agentfactory.base.user_code.places import described, frames_of, of_users, place_of

BLOCKS_LOOP = (
    "write the async function as `def`, which runs in a thread, or call what blocks by `await asyncio.to_thread(...)`"
)
"""Fix for user code that blocks an event loop."""

_told: set[CodeType] = set()
"""Users' functions of which the user was warned."""

Warn = Callable[[str, str], None]
"""(topic, text): warns the user."""

QUIET_SECONDS = 10.0
"""Seconds after which the user is told what has not ended. Each further time comes after three times as long."""
BEAT_SECONDS = 1.0
"""Seconds between two beats to a supervising process."""
BLOCKED_SECONDS = 0.5
"""Seconds, within a minute, for which a user's function may block an event loop without a warning."""
_LOOK_SECONDS = 0.1
_MINUTE = 60.0


def growing(seconds: float) -> float:
    """Return the seconds after which to repeat what was told after `seconds`."""
    return 3 * seconds


@dataclass(eq=False)
class _Activity:
    """A call of user code, `what` in words, such as `importing tools.py`."""

    what: str
    thread: int
    since: float
    due: float = 0.0

    def look(self, now: float) -> str | None:
        """Return what to tell the user now, if anything."""
        seconds = now - self.since
        if seconds < (self.due or QUIET_SECONDS):
            return None
        self.due = growing(seconds)
        at = described([place_of(frame) for frame in frames_of(sys._current_frames().get(self.thread))])
        return f"still {self.what}, {seconds:.0f} s so far" + (f" (in {at})" if at else "")


@dataclass(eq=False)
class _Loop:
    """An event loop, which answers each look unless a callback blocks it."""

    loop: asyncio.AbstractEventLoop
    thread: int
    warn: Warn
    users: int = 0
    asked: bool = False
    looked: float = 0.0
    held: FrameType | None = None
    """The user's function that ran at the last look. A reference, because a later frame may have the same address."""
    blocked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """User's function -> seconds of this minute for which it blocked the loop."""
    minute: float = 0.0
    since: float = 0.0

    def look(self, now: float) -> str | None:
        """Warn of a user's function that has blocked the loop for BLOCKED_SECONDS. Return the one that blocks it, if
        any, with its place."""
        seconds, self.looked = now - self.looked, now
        if not self.asked:
            self.asked, self.held = True, None
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._answer)
            return None
        # the same callback since the last look, because the loop answers after each round of callbacks
        stack = frames_of(sys._current_frames().get(self.thread))
        places = [place_of(frame) for frame in stack]
        users = of_users(places)
        before, self.held = self.held, stack[users[0]] if users else None
        if before is not self.held:
            self.since = now
        if self.held is None or before is not self.held or not self.asked:
            return None
        if now - self.minute > _MINUTE:
            self.minute = now
            self.blocked.clear()
        name = self.held.f_code.co_qualname
        where = described(places)
        self.blocked[name] += seconds
        if self.blocked[name] >= BLOCKED_SECONDS and (code := self.held.f_code) not in _told:
            _told.add(code)
            fix = BLOCKS_LOOP
            if not code.co_flags & inspect.CO_COROUTINE:
                fix = "it runs on the event loop, so let it return sooner"
            text = f"{name} blocks the event loop ({where}), so that all chains wait for it; fix: {fix}"
            with suppress(RuntimeError):  # the loop, which passes warnings on, has just been closed
                self.warn(f"{code.co_filename}: {name} blocks the event loop", text)
        return where

    def _answer(self) -> None:
        self.asked = False


def print_error(text: str) -> None:
    """Print a line to stderr, unless its reader is gone."""
    with suppress(OSError, ValueError):
        print(f"agentfactory: {text}", file=sys.stderr, flush=True)


class _Watch:
    """What is watched in this process, and the thread that does it."""

    def __init__(self) -> None:
        self.say: Callable[[str], None] = print_error
        self.activities: list[_Activity] = []
        self.loops: list[_Loop] = []
        self.supervisor: int | None = None
        """File descriptor of the pipe to a supervising process."""
        self.limit: tuple[float, str] | None = None
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="watch of user code", daemon=True).start()

    def _run(self) -> None:
        beat = 0.0
        while True:
            with self._lock:
                if not (self.activities or self.loops or self.supervisor is not None):
                    self._running = False
                    return
            now = time.monotonic()
            if now - beat >= BEAT_SECONDS:
                beat = now
                tell("beat")
            for activity in [*self.activities]:
                if (text := activity.look(now)) is not None:
                    self.say(text)
            for loop in [*self.loops]:
                where = loop.look(now)
                if (
                    where is not None
                    and self.limit is not None
                    and now - loop.since > max(self.limit[0], QUIET_SECONDS)
                ):
                    tell("stuck", f"{where} has blocked the event loop for longer than {self.limit[1]}")
            time.sleep(_LOOK_SECONDS)


_watch = _Watch()


def _after_fork() -> None:
    # a forked process has none of our threads, and its parent answers for what it does
    global _watch
    say, _watch = _watch.say, _Watch()
    _watch.say = say


os.register_at_fork(after_in_child=_after_fork)


def say(text: str) -> None:
    """Tell the user, as `say_by` has chosen."""
    _watch.say(text)


def say_by(say: Callable[[str], None]) -> None:
    """Tell the user by `say` what has not ended; by default, it is printed to stderr."""
    _watch.say = say


def supervise(writer: int) -> None:
    """Send beats, and what `tell` is given, to the supervising process at the other end of a pipe."""
    _watch.supervisor = writer
    _watch.start()


def tell(*words: object) -> None:
    """Send a line to the supervising process, if there is one."""
    if _watch.supervisor is not None:
        # a supervisor that is stopped reads nothing, and one that is gone ends this process
        with suppress(OSError):
            os.write(_watch.supervisor, f"\n@{' '.join(map(str, words))}\n".encode())


@contextmanager
def limited(seconds: float, setting: str) -> Iterator[None]:
    """Let the supervising process end this one, in this context, if user code holds Python's lock or blocks an event
    loop for `seconds`, the value of `setting`. The outermost such limit counts."""
    if _watch.limit is not None:
        yield
        return
    _watch.limit = (seconds, f"{setting}={seconds:g}")
    tell("limit", *_watch.limit)
    try:
        yield
    finally:
        _watch.limit = None
        tell("limit")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Tell the user, in this context, from QUIET_SECONDS on, that `what` (`importing tools.py`) has not ended."""
    activity = _Activity(what, threading.get_ident(), time.monotonic())
    _watch.activities.append(activity)
    _watch.start()
    tell("doing", what)
    try:
        yield
    finally:
        with suppress(ValueError):  # a forked process has another list
            _watch.activities.remove(activity)
            tell("doing", *(other.what for other in _watch.activities[-1:]))


@contextmanager
def loop_watched(warn: Warn) -> Iterator[None]:
    """Warn by `warn`, in this context, of users' functions that block the running event loop."""
    running, now = asyncio.get_running_loop(), time.monotonic()
    watched = next((other for other in _watch.loops if other.loop is running), None)
    if watched is None:
        watched = _Loop(running, threading.get_ident(), warn, looked=now, minute=now)
        _watch.loops.append(watched)
        _watch.start()
    watched.users += 1
    try:
        yield
    finally:
        watched.users -= 1
        if not watched.users:
            watched.held = None
            with suppress(ValueError):  # a forked process has another list
                _watch.loops.remove(watched)
