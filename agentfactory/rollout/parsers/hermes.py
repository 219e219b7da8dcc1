"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's text.

The format is that of NousResearch/Hermes-Function-Calling, which the chat templates of Qwen2.5 and Qwen3 write too.
"""

import json
from collections.abc import Sequence

from agentfactory.rollout.parsers.parser import Call, FormatError, NativeParser, Reading
from agentfactory.rollout.parsers.values import KINDS, read_json, skip_space
from agentfactory.tools.messages import ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(NativeParser):
    """`<tool_call>{"name": "search", "arguments": {"query": "rain"}}</tool_call>`, once per call."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """See Parser."""
        outside: list[str] = []
        calls: list[Call] = []
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            outside.append(text[position:start])
            try:
                call, position = _read_call(text, start + len(OPEN))
            except ValueError as error:
                raise FormatError(f"Malformed tool call {len(calls) + 1}: {error}") from error
            calls.append(call)
        outside.append(text[position:])
        if any(CLOSE in part for part in outside):
            raise FormatError(f"Malformed tool call: {CLOSE} without {OPEN} before it")
        return Reading("\n".join(part.strip() for part in outside if part.strip()), calls)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        objects = [json.dumps({"name": n, "arguments": arguments}, ensure_ascii=False) for n, arguments in calls]
        return "\n".join(f"{OPEN}\n{call}\n{CLOSE}" for call in objects)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return f'Write each call as {OPEN}\n{{"name": "tool_name", "arguments": {{...}}}}\n{CLOSE}'


def _read_call(text: str, position: int) -> tuple[Call, int]:
    """Return a call, and the position after its closing tag. Raises ValueError with a message for the model."""
    value, end = read_json(text, skip_space(text, position))
    end = skip_space(text, end)
    if not text.startswith(CLOSE, end):
        raise ValueError(f"no {CLOSE} after the JSON object")
    return read_call_object(value, "arguments"), end + len(CLOSE)


def read_call_object(call: object, *keys: str) -> Call:
    """Read a call from a JSON object with its arguments under one of `keys`. Raises ValueError with a message for the
    model."""
    if not isinstance(call, dict):
        raise ValueError(f"expected a JSON object, not {KINDS[type(call)]}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is missing' if "name" not in call else '"name" must be a non-empty string')
    key = next((key for key in keys if key in call), keys[0])
    if key not in call and len(call) > 1:
        others = ", ".join(json.dumps(other) for other in call if other != "name")
        raise ValueError(f'"{key}" is missing, but there is {others}')
    # a tool without parameters needs no arguments; if a required argument is missing, the tool's own check reports it
    arguments = call.get(key, {})
    if not isinstance(arguments, dict):
        raise ValueError(f'"{key}" must be a JSON object, not {KINDS[type(arguments)]}')
    return name, arguments
