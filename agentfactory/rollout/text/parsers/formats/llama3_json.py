"""Llama 3's formats: a turn that consists only of `{"name": ..., "parameters": {...}}`, and Functionary's tags.

The chat templates of Llama 3.1 and later write one call per turn. Several calls separated by semicolons are parsed too.
Functionary 3.1 is based on Llama 3.1, and writes Llama's form of custom tools."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import Block, Blocks, expect, match, read_call_object, read_object
from agentfactory.rollout.text.parsers.parser import Call, FormatError, NativeParser, Reading, find_spec, sole_parameter
from agentfactory.rollout.text.parsers.values import read_json, skip_space, whole_object

TAG = "<|python_tag|>"
_ALONE = "Malformed tool call: a turn with a call has nothing beside it"
_BEGINS = re.compile(r'\{\s*"(?:name|parameters|arguments|function)"\s*:')
_NAME = re.compile(r"([^\s<>]+)>")
_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')


class Llama3Json(NativeParser):
    """`{"name": "search", "parameters": {"query": "rain"}}`."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """JSON that is not a call is an answer."""
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
                is_call = (
                    isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
                )
                if not tagged and not calls and not is_call:
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
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return 'Write a call as {"name": "tool_name", "parameters": {...}} and nothing else'


class Functionary(Blocks):
    """`<function=search>{"query": "rain"}</function>`, once per call. A call of the tool `python` may be the rest of
    the turn, after `<|python_tag|>`: its arguments as JSON, as the template writes them, or its code."""

    OPEN, CLOSE = "<function=", "</function>"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        found = super().read(text, specs)
        words, tag, code = found.content.partition(TAG)
        if not tag:
            return found
        arguments, _ = whole_object(code.strip())
        if arguments is None:
            spec = find_spec("python", specs)
            arguments = {(spec and sole_parameter(spec)) or "code": code.strip()}
        return replace(found, content=words.rstrip(), calls=[*found.calls, ("python", arguments)])

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        name = match(_NAME, text, position, f"no tool's name and > after {self.OPEN}")
        arguments, end = read_object(text, name.end())
        return [(name[1], arguments)], expect(text, end, self.CLOSE, "the JSON object")

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "".join(f"{self.OPEN}{n}>{json.dumps(given, ensure_ascii=False)}{self.CLOSE}" for n, given in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {self.OPEN}tool_name>{{...}}{self.CLOSE}, with the arguments as a JSON object"
