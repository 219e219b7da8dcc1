"""A watch over users' code: it names what takes long, and what blocks an event loop. While code holds Python's lock, a
supervising process sees the missing beats (`processes.supervised`)."""

import asyncio
import inspect
import os
import re
import sys
import sysconfig
import threading
import time
from asyncio import events
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

BLOCKS_LOOP = (
    "write the async function as `def`, which runs in a thread, or call what blocks by `await asyncio.to_thread(...)`"
)

Warn = Callable[[str, str], None]

QUIET_SECONDS = 10.0
"""Seconds until the first notice of a running call; each further notice takes three times as long."""
BEAT_SECONDS = 1.0
BLOCKED_SECONDS = 0.5
"""Seconds, within a minute, for which a user's function may block an event loop without a warning."""
_LOOK_SECONDS = 0.1

_OURS = f"{Path(__file__).resolve().parents[2]}/"
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_LIBRARIES = {"site-packages", "dist-packages"}

_doing: list[str] = []
"""The user code that this process executes, such as `importing tools.py`."""
_limit: tuple[float, str] | None = None
_supervisor: tuple[int, int] | None = None
"""This process, and the descriptor of its pipe to a supervising process."""
_watched: Counter[asyncio.AbstractEventLoop] = Counter()
_told: set[CodeType] = set()


class Place(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}, line {self.line}, in {self.function}"


def is_ours(file: str) -> bool:
    return file.startswith(_OURS)


def _of_users(stack: Sequence[Place]) -> list[int]:
    """Return the indices of the user's code in a stack, outermost first, after the last call of ours or of a loop."""
    found: list[int] = []
    for index, place in enumerate(stack):
        if is_ours(place.file) or place.file == events.__file__:
            found = []
        elif not (place.file.startswith(("<", *_STANDARD)) or _LIBRARIES & {*Path(place.file).parts}):
            found.append(index)
    return found


def described(stack: Sequence[Place]) -> str | None:
    """Describe the user's code in a stack, the outermost place first; None if there is none."""
    users = [stack[index] for index in _of_users(stack)]
    if not users:
        return None
    called, at = users[0], users[-1]
    return str(at) if called.function == at.function else f"{at}, called by {called.function}"


def parsed_dump(text: str) -> list[Place]:
    """Return the stack that `faulthandler` has written, the outermost place first."""
    found = re.findall(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', text, re.MULTILINE)
    return [Place(file, int(line) if line.isdigit() else 0, name) for file, line, name in found][::-1]


def place_of(frame: FrameType, line: int | None = None) -> Place:
    """Return the place at which a frame is, or was, at `line`."""
    return Place(frame.f_code.co_filename, line or frame.f_lineno or 0, frame.f_code.co_name)


def _stack_of(thread: int) -> list[FrameType]:
    found, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def print_error(text: str) -> None:
    """Print a line to stderr, unless its reader is gone."""
    with suppress(OSError, ValueError):
        print(f"agentfactory: {text}", file=sys.stderr, flush=True)


_say: Callable[[str], None] = print_error


def say(text: str) -> None:
    _say(text)


def say_by(say: Callable[[str], None]) -> None:
    """Tell the user by `say` what has not ended; by default, it is printed to stderr."""
    global _say
    _say = say


def supervise(writer: int) -> None:
    """Send beats, and what `tell` is given, to the supervising process at the other end of a pipe."""
    global _supervisor
    _supervisor = os.getpid(), writer

    def beat() -> None:
        while True:
            tell("beat")
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, name="beats", daemon=True).start()


def tell(*words: object) -> None:
    """Send a line to the supervising process, if this process has one."""
    if _supervisor is not None and _supervisor[0] == os.getpid():
        # a supervisor that is stopped reads nothing, and one that is gone ends this process
        with suppress(OSError):
            os.write(_supervisor[1], f"\n@{' '.join(map(str, words))}\n".encode())


@contextmanager
def limited(seconds: float, setting: str) -> Iterator[None]:
    """Let the supervising process end this one, in this context, if user code holds Python's lock or blocks an event
    loop for `seconds`, the value of `setting`. The outermost such limit counts."""
    global _limit
    if _limit is not None:
        yield
        return
    _limit = (seconds, f"{setting}={seconds:g}")
    tell("limit", *_limit)
    try:
        yield
    finally:
        _limit = None
        tell("limit")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Tell the user, in this context, from QUIET_SECONDS on, that `what` (`importing tools.py`) has not ended."""
    ended, thread, since = threading.Event(), threading.get_ident(), time.monotonic()

    def remind() -> None:
        due = QUIET_SECONDS
        while not ended.wait(since + due - time.monotonic()):
            at = described([*map(place_of, _stack_of(thread))])
            say(f"still {what}, {due:.0f} s so far" + (f" (in {at})" if at else ""))
            due *= 3

    threading.Thread(target=remind, name="watch of user code", daemon=True).start()
    _doing.append(what)
    tell("doing", what)
    try:
        yield
    finally:
        ended.set()
        _doing.remove(what)
        tell("doing", *_doing[-1:])


@contextmanager
def loop_watched(warn: Warn) -> Iterator[None]:
    """Warn by `warn`, in this context, of users' functions that block the running event loop."""
    loop = asyncio.get_running_loop()
    _watched[loop] += 1
    if _watched[loop] == 1:
        arguments = (loop, threading.get_ident(), warn)
        threading.Thread(target=_watch, args=arguments, name="watch of the event loop", daemon=True).start()
    try:
        yield
    finally:
        _watched[loop] -= 1


def _watch(loop: asyncio.AbstractEventLoop, thread: int, warn: Warn) -> None:
    """Ask the loop to answer, which it does after each round of callbacks, as long as it is watched."""
    blocked: defaultdict[CodeType, float] = defaultdict(float)
    minute = time.monotonic()
    while _watched[loop]:
        if time.monotonic() - minute > 60.0:
            minute = time.monotonic()
            blocked.clear()
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            break
        _look_until(answered, thread, blocked, warn)
        time.sleep(_LOOK_SECONDS)
    del _watched[loop]


def _look_until(answered: threading.Event, thread: int, blocked: dict[CodeType, float], warn: Warn) -> None:
    """Watch the thread of a loop that does not answer, and add up the seconds that users' functions block it."""
    # the function that ran at the last look: a reference, because a later frame may have the same address
    before, since, looked = None, 0.0, time.monotonic()
    while not answered.wait(_LOOK_SECONDS):
        stack, now = _stack_of(thread), time.monotonic()
        places = [*map(place_of, stack)]
        users = _of_users(places)
        held, seconds, looked = stack[users[0]] if users else None, now - looked, now
        if held is None or held is not before:
            before, since = held, now
            continue
        where, code = described(places), held.f_code
        blocked[code] += seconds
        if blocked[code] >= BLOCKED_SECONDS and code not in _told:
            _told.add(code)
            is_async = code.co_flags & inspect.CO_COROUTINE
            fix = BLOCKS_LOOP if is_async else "it runs on the event loop, so let it return sooner"
            name = code.co_qualname
            text = f"{name} blocks the event loop ({where}), so that all chains wait for it; fix: {fix}"
            with suppress(RuntimeError):  # the loop, which passes warnings on, has just been closed
                warn(f"{code.co_filename}: {name} blocks the event loop", text)
        if _limit is not None and now - since > max(_limit[0], QUIET_SECONDS):
            tell("stuck", f"{where} has blocked the event loop for longer than {_limit[1]}")
