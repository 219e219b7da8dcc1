"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's text.

The format is that of NousResearch/Hermes-Function-Calling, which Qwen's chat templates write too.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXPECTED = f'Write each call as {OPEN}\n{{"name": "tool_name", "arguments": {{...}}}}\n{CLOSE}'


@dataclass(frozen=True)
class Calls:
    """What stands in a text: the words outside the calls, and the calls as (name, arguments).

    `error` says, in words for the model, what is wrong with the first malformed call. Then `calls` is empty and
    `content` the whole text: a turn is executed as a whole or not at all.
    """

    content: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: str | None = None


def parse_calls(text: str) -> Calls:
    """Read the calls of an assistant's text. Never raises, whatever the text; linear in its length."""
    outside: list[str] = []
    calls: list[tuple[str, dict[str, Any]]] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        outside.append(text[position:start])
        try:
            name, arguments, position = _read_call(text, start + len(OPEN))
        except ValueError as error:
            return Calls(text.strip(), error=f"Malformed tool call {len(calls) + 1}: {error}. {EXPECTED}")
        calls.append((name, arguments))
    outside.append(text[position:])
    if any(CLOSE in part for part in outside):
        return Calls(text.strip(), error=f"Malformed tool call: {CLOSE} without {OPEN} before it. {EXPECTED}")
    return Calls("\n".join(part.strip() for part in outside if part.strip()), calls)


def _read_call(text: str, position: int) -> tuple[str, dict[str, Any], int]:
    """One call's name, arguments, and the position after its closing tag. Raises ValueError in words for the model."""
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        # the JSON value says itself where it ends, so that a closing tag inside a string argument is only text
        call, end = _DECODER.raw_decode(text, position)
        json.dumps(call, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos - position})") from error
    except UnicodeEncodeError as error:
        raise ValueError("not valid JSON (half of a surrogate pair)") from error
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    while end < len(text) and text[end].isspace():
        end += 1
    if not text.startswith(CLOSE, end):
        raise ValueError(f"no {CLOSE} after the JSON object")
    if not isinstance(call, dict):
        raise ValueError(f"expected a JSON object, not {_KINDS[type(call)]}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is missing' if "name" not in call else '"name" must be a non-empty string')
    if "arguments" not in call and len(call) > 1:
        others = ", ".join(json.dumps(key) for key in call if key != "name")
        raise ValueError(f'"arguments" is missing, but there is {others}')
    # a tool without parameters needs no "arguments"; where the tool has required ones, its own check says so
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" must be a JSON object, not {_KINDS[type(arguments)]}')
    return name, arguments, end + len(CLOSE)


_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:20]} is too large")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
