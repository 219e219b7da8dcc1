"""Places in users' code: the file, line and function in which a stack is."""

import re
import sysconfig
from asyncio import events
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_OURS = f"{Path(__file__).resolve().parents[2]}/"
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_LIBRARIES = {"site-packages", "dist-packages"}


class Place(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}, line {self.line}, in {self.function}"


def is_ours(file: str) -> bool:
    """Return whether a file of code is AgentFactory's."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Return whether a file of code is neither ours, nor the standard library's, nor an installed package's."""
    if is_ours(file) or file.startswith("<") or _LIBRARIES & {*Path(file).parts}:
        return False
    return not file.startswith(_STANDARD)


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a stack, the outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def place_of(frame: FrameType) -> Place:
    """Return the place at which a frame is."""
    return place_of_line(frame, frame.f_lineno or 0)


def place_of_line(frame: FrameType, line: int) -> Place:
    """Return a place in a frame, which may have gone on meanwhile."""
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name)


def of_users(stack: Sequence[Place]) -> list[int]:
    """Return the indices of the user's code in a stack, the outermost place first: of what our code, or an event loop,
    has called last. A script that calls us is not what we have called."""
    found: list[int] = []
    for index, place in enumerate(stack):
        if is_ours(place.file) or place.file == events.__file__:
            found = []
        elif is_users(place.file):
            found.append(index)
    return found


def described(stack: Sequence[Place]) -> str | None:
    """Describe the user's code in a stack, the outermost place first: where it is, and the function that was called
    first. None if there is none."""
    users = [stack[index] for index in of_users(stack)]
    if not users:
        return None
    called, at = users[0], users[-1]
    return str(at) if called.function == at.function else f"{at}, called by {called.function}"


def parsed_dump(text: str) -> list[Place]:
    """Return the stack that `faulthandler` has written, the outermost place first."""
    found = re.findall(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', text, re.MULTILINE)
    return [Place(file, int(line) if line.isdigit() else 0, name) for file, line, name in found][::-1]
