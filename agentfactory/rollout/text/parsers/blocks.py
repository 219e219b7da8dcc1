"""Formats of calls between opening and closing tags, and the parsing of the calls' JSON."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.parser import Call, FormatError, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import KINDS, read_json, skip_space

Block = tuple[list[Call], int]
"""The calls of a block, and the position after its closing tag."""


class Blocks(NativeParser):
    """A format with calls between the tags OPEN and CLOSE, which may be empty, and other text outside."""

    OPEN: str
    CLOSE: str

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        ids: list[str] = []
        return read_blocks(text, self.OPEN, self.CLOSE, lambda start: self.read_block(text, start, specs, ids), ids)

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        """Parse the block after an opening tag, and append its calls' ids, if any. Raises ValueError for the model."""
        raise NotImplementedError


def read_blocks(
    text: str, opening: str, closing: str, read_block: Callable[[int], Block], ids: Sequence[str] = ()
) -> Reading:
    """Parse calls by `read_block`, which gets the position after an opening tag, and other text. Raises FormatError."""
    outside: list[str] = []
    calls: list[Call] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        outside.append(text[position:start])
        try:
            found, position = read_block(start + len(opening))
        except ValueError as error:
            raise FormatError(f"Malformed tool call {len(calls) + 1}: {error}") from error
        calls += found
    outside.append(text[position:])
    if closing and any(closing in part for part in outside):
        raise FormatError(f"Malformed tool call: {closing} without {opening} before it")
    return Reading(join_parts(outside), calls, ids=list(ids))


def join_parts(outside: list[str]) -> str:
    """Join the parts of a turn outside its calls, one per line."""
    return "\n".join(part.strip() for part in outside if part.strip())


def match(pattern: re.Pattern[str], text: str, position: int, problem: str) -> re.Match[str]:
    """Return the match of a pattern, which must come next. Raises ValueError."""
    found = pattern.match(text, position)
    if found is None:
        raise ValueError(problem)
    return found


def expect(text: str, position: int, tag: str, after: str) -> int:
    """Return the position after `tag`, which must come next, ignoring white space. Raises ValueError."""
    position = skip_space(text, position)
    if not text.startswith(tag, position):
        raise ValueError(f"no {tag} after {after}")
    return position + len(tag)


def read_object(text: str, position: int) -> tuple[dict[str, object], int]:
    """Return the JSON object with a call's arguments, and its end position. Raises ValueError."""
    value, end = read_json(text, skip_space(text, position))
    if not isinstance(value, dict):
        raise ValueError(f"the arguments must be a JSON object, not {KINDS[type(value)]}")
    return value, end


def read_call_object(call: object, *keys: str, name_key: str = "name") -> Call:
    """Parse a call from a JSON object with its name under `name_key`, and its arguments under one of `keys`."""
    if not isinstance(call, dict):
        raise ValueError(f"expected a JSON object, not {KINDS[type(call)]}")
    name = call.get(name_key)
    if not isinstance(name, str) or not name:
        raise ValueError(f'"{name_key}" {"must be a non-empty string" if name_key in call else "is missing"}')
    key = next((key for key in keys if key in call), keys[0])
    if key not in call and len(call) > 1:
        others = ", ".join(json.dumps(other) for other in call if other != name_key)
        raise ValueError(f'"{key}" is missing, but there is {others}')
    # a tool without parameters needs no arguments; if a required argument is missing, the tool's own check reports it
    arguments = call.get(key, {})
    if not isinstance(arguments, dict):
        raise ValueError(f'"{key}" must be a JSON object, not {KINDS[type(arguments)]}')
    return name, arguments


class Fenced(NamedTuple):
    """A block between the fences [begin, code) and [stop, end), which may be empty, with the first one's `language`."""

    begin: int
    code: int
    stop: int
    end: int
    language: str


_FENCE = re.compile(r"^[ \t]*+(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)


def fenced_blocks(text: str) -> Iterator[Fenced]:
    """Yield the blocks of a text between lines of at least three backquotes."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif not fence[2] and len(fence[1]) >= len(opened[1]):
            yield Fenced(opened.start(), opened.end(), fence.start(), fence.end(), opened[2].lower())
            opened = None
    if opened is not None:
        yield Fenced(opened.start(), opened.end(), len(text), len(text), opened[2].lower())
