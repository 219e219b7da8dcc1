"""Llama 3's JSON: a turn that consists only of `{"name": ..., "parameters": {...}}`.

The chat templates of Llama 3.1 and later write one call per turn. Several calls separated by semicolons are parsed too.
"""

import json
import re
from collections.abc import Sequence

from agentfactory.rollout.text.parsers.blocks import read_call_object
from agentfactory.rollout.text.parsers.parser import Call, FormatError, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import read_json, skip_space
from agentfactory.tools.messages import ToolSpec

TAG = "<|python_tag|>"
_ALONE = "Malformed tool call: a turn with a call has nothing beside it"
_BEGINS = re.compile(r'\{\s*"(?:name|parameters|arguments|function)"\s*:')
_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')


class Llama3Json(NativeParser):
    """`{"name": "search", "parameters": {"query": "rain"}}`."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """See Parser. JSON that is not a call is an answer."""
        words = text.strip()
        tagged = words.startswith(TAG)
        if not tagged and not words.startswith("{"):
            if TAG in words or _CALL.search(words):
                raise FormatError(_ALONE)
            return Reading(words)
        calls: list[Call] = []
        position = skip_space(words, len(TAG) if tagged else 0)
        while not calls or position < len(words):
            try:
                value, position = read_json(words, position)
                if not tagged and not calls and not _is_call(value):
                    return Reading(words)
                calls.append(read_call_object(value, "parameters", "arguments"))
            except ValueError as error:
                if not tagged and not calls and not _BEGINS.match(words):
                    return Reading(words)
                raise FormatError(f"Malformed tool call {len(calls) + 1}: {error}") from error
            position = skip_space(words, position)
            if words.startswith(";", position):
                position = skip_space(words, position + 1)
            elif position < len(words) and words[position] != "{":
                raise FormatError(_ALONE)
        return Reading("", calls)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return 'Write a call as {"name": "tool_name", "parameters": {...}} and nothing else'


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
