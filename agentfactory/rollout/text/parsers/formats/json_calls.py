"""Calls as JSON in ordinary text, fenced or bare, which many models write whatever their chat template describes."""

import json
import re
from collections.abc import Iterator, Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import fenced_blocks, join_parts, read_call_object
from agentfactory.rollout.text.parsers.parser import Call, FormatError, Parser, Reading, find_spec
from agentfactory.rollout.text.parsers.values import read_json, skip_space

_KEYS = ("arguments", "parameters")
_RESULT = "[result of "
_OBJECT = re.compile(
    r'\{\{?\s*+"(?:name|arguments|parameters)"\s*+:\s*+(?:"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"\s*+[,}]|[^"\s])'
)
"""The beginning of an object that can be a call. It includes the first value if that is text: a JSON error takes as
long as the text before it, so beginnings that cannot go on must not be read."""
_CALL = re.compile(r'\{\s*+"name"\s*+:\s*+"[^"\n]*+"\s*+,\s*+"(?:arguments|parameters)"\s*+:')
"""The beginning of a call; if it continues as anything else, the turn is malformed."""
_LANGUAGES = ("", "json", "tool_call", "tool_code")
_AFTER = re.compile(r"[\s\],;]*+(?:(?<=\n)[ \t]*+`{3,}+[ \t]*+(?=\n|\Z))?")


class JsonCalls(Parser):
    """`{"name": "search", "arguments": {"query": "rain"}}`, once per call, with or without a fence. `parameters` may
    stand for `arguments`, the calls may be a list, and the outer braces may be doubled, as some chat templates show
    them. Other JSON is ordinary text, and so are blocks in other languages."""

    stops = (f"\n{_RESULT}",)
    around_result = f"{_RESULT}{{}}]\n", ""
    after_form = "\nThen wait: you are told the result. A turn without a call is your answer."

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        if any(line.startswith(_RESULT) for line in text.splitlines()):
            raise FormatError(f"The turn has {_RESULT.strip()}: results come from the tools, after the turn")
        calls: list[Call] = []
        outside: list[str] = []
        position = 0
        for begin, end, call in _calls(text, specs):
            outside.append(text[position:begin].rstrip(" \t\r\n["))
            calls.append(call)
            after = _AFTER.match(text, end)
            position = after.end() if after else end
        outside.append(text[position:])
        return Reading(join_parts(outside), calls)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        objects = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
        return "\n".join(f"```json\n{call}\n```" for call in objects)


def _calls(text: str, specs: Sequence[ToolSpec]) -> Iterator[tuple[int, int, Call]]:
    blocks = fenced_blocks(text)
    block = next(blocks, None)
    position = last = 0
    while found := _OBJECT.search(text, position):
        begin = found.start()
        while block is not None and block.end <= begin:
            block = next(blocks, None)
        if block is not None and block.begin <= begin and block.language not in _LANGUAGES:
            position = block.end
            continue
        doubled = text.startswith("{{", begin)
        is_call = _CALL.match(text, begin + doubled) is not None
        try:
            value, end = read_json(text, begin + doubled)
            name, has_arguments = value.get("name"), not value.keys().isdisjoint(_KEYS)
            if isinstance(name, str) and (has_arguments or (len(value) == 1 and find_spec(name, specs) is not None)):
                is_call = True
            call = read_call_object(value, *_KEYS) if is_call else None
        except ValueError as error:
            cause = error.__cause__
            if is_call or not isinstance(cause, json.JSONDecodeError):
                raise FormatError(f"Malformed tool call: {error}") from error
            # not begin + 1: nested beginnings would take quadratic time
            position = max(begin + 1, cause.pos)
            continue
        position = end
        if call is not None:
            if doubled and text.startswith("}", closing := skip_space(text, end)):
                position = closing + 1
            # a fence that opens the first call in it is part of the call
            if block is not None and last <= block.begin <= begin and not text[block.code : begin].strip(" \t\r\n["):
                begin = block.begin
            last = position
            yield begin, position, call
