"""Saved groups as plain JSON: their outline without the rows' streams, or one complete group."""

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from agentfactory.base.files.untrusted_files import JSON_VALUES, has_few_values, open_file
from agentfactory.base.messages import text_of
from agentfactory.rollout.groups.group_files import read_record, restore_streams

# a quote within a string is escaped, so no text of a message can match
_STREAM = re.compile(
    rb'"(token_ids|mask|logprobs|weights|turn_ends|targets|advantage|proximal|divergence)": ?'
    rb"\[([-+0-9.eE, NaInfityul]*)\]"
)


def outline(line: bytes) -> Any:
    """Parse a line of a trajectories file or of the trainer's credit, with each inline stream replaced by its number of
    values. This is several times faster than parsing the streams. Raises ValueError if the line is not JSON."""
    counted = _STREAM.sub(_count, line)
    if not has_few_values(counted):
        raise ValueError(f"it has more than {JSON_VALUES:,} values")
    return from_json(counted)


def _count(stream: re.Match[bytes]) -> bytes:
    entries = stream[2].count(b",") + 1 if stream[2] else 0
    return b'"%b": %d' % (stream[1], entries)


def read_line(path: Path, offset: int, length: int, within: Path) -> Any:
    """Parse a complete line. Raises ValueError if it is not JSON, OSError if the file cannot be read."""
    return from_json(read_bytes(path, offset, length, within))


def read_group(path: Path, offset: int, length: int, within: Path) -> tuple[Any, str | None]:
    """Parse a complete group, with arrays for the streams of its rows. If these cannot be read, its chains have no
    rows, and the second value gives the reason. Raises ValueError if the line is no group, or OSError."""
    group = read_line(path, offset, length, within)
    try:
        restore_streams(group, read_record(group, path, within))
    except ValueError as error:
        for chain in group["trajectories"]:
            chain["rows"] = []
        return group, str(error)
    return group, None


def read_bytes(path: Path, offset: int, length: int, within: Path) -> bytes:
    """Return `length` bytes from `offset` on. Links below the folder `within` are not followed."""
    with open_file(path, within) as file:
        file.seek(offset)
        return file.read(length)


def calls_of(message: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield str(function.get("name", "")), function.get("arguments")


def texts_of(task: dict[str, Any], chain: dict[str, Any]) -> Iterator[str]:
    """Yield the texts for text search: the task, and all messages of a chain."""
    yield str(chain["id"])
    yield json.dumps(task, ensure_ascii=False)
    yield str(chain.get("error") or "")
    for message in chain["messages"]:
        yield _said(message)
        yield str(message.get("reasoning_content") or "")
        for name, arguments in calls_of(message):
            yield name
            yield json.dumps(arguments, ensure_ascii=False)


def task_text(group: dict[str, Any]) -> str:
    """Return the task of a group as text: the question and the text of an environment's reset, or the task as JSON."""
    asked = []
    for chain in group["trajectories"][:1]:
        for message in takewhile(lambda message: message.get("role") != "assistant", chain["messages"]):
            if message.get("role") == "user":
                asked.append(_said(message))
    return "\n".join(asked) if asked else json.dumps(group["task"], ensure_ascii=False)


def _said(message: dict[str, Any]) -> str:
    """Return a message's content as text; content with unknown kinds of parts is returned as JSON."""
    content = message.get("content") or ""
    try:
        return text_of(content)
    except (LookupError, TypeError, AttributeError, ValueError):
        return json.dumps(content, ensure_ascii=False)
