"""Gemma: `call:name{key:value}` between tags. Gemma 4 and FunctionGemma have different tags and quotes.

Keys have no quotes. Values are JSON, but with the format's own quotes around strings, so text needs no escapes.
Gemma 3's chat template does not support tools: use a text format."""

import json
import re
from collections.abc import Sequence
from typing import Any

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import Block, Blocks, expect, match
from agentfactory.rollout.text.parsers.parser import Arguments, Call
from agentfactory.rollout.text.parsers.values import MAX_DEPTH, read_number, skip_space

_NAME = re.compile(r"\s*call:([^\s{}:]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
_PLAIN = re.compile(r"[^\s,{}\[\]]+")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Gemma4(Blocks):
    """`<|tool_call>call:search{query:<|"|>rain<|"|>,limit:3}<tool_call|>`, once per call."""

    OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        name = match(_NAME, text, position, f"no call:tool_name{{...}} after {self.OPEN}")
        arguments, end = self._mapping(text, name.end(), 0)
        return [(name[1], arguments)], expect(text, end, self.CLOSE, "the arguments")

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "".join(f"{self.OPEN}call:{name}{self._write(arguments)}{self.CLOSE}" for name, arguments in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {self.write([('tool_name', {'argument_name': 'value'})], specs)}"

    def _write(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._write(inner)}" for key, inner in sorted(value.items())) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._write, value)) + "]"
        if isinstance(value, str):
            if self.QUOTE in value:
                raise ValueError(f"a string with {self.QUOTE} cannot be written")
            return f"{self.QUOTE}{value}{self.QUOTE}"
        return json.dumps(value)

    def _mapping(self, text: str, position: int, depth: int) -> tuple[Arguments, int]:
        found: Arguments = {}
        position = skip_space(text, position + 1)
        while not text.startswith("}", position):
            if text.startswith(self.QUOTE, position):
                name, position = self._string(text, position)
                position = expect(text, position, ":", "a key")
            elif (bare := _KEY.match(text, position)) is not None:
                name, position = bare[1], bare.end()
            else:
                raise ValueError(f"expected key:value at {text[position : position + 20]!r}")
            if name in found:
                raise ValueError(f"the key {name} is given twice")
            found[name], position = self._value(text, position, depth + 1)
            position = self._next(text, position, "}")
        return found, position + 1

    def _value(self, text: str, position: int, depth: int) -> tuple[Any, int]:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        position = skip_space(text, position)
        if text.startswith(self.QUOTE, position):
            return self._string(text, position)
        if text.startswith("{", position):
            return self._mapping(text, position, depth)
        if text.startswith("[", position):
            items: list[Any] = []
            position = skip_space(text, position + 1)
            while not text.startswith("]", position):
                item, position = self._value(text, position, depth + 1)
                items.append(item)
                position = self._next(text, position, "]")
            return items, position + 1
        found = _PLAIN.match(text, position)
        if found is None:
            raise ValueError(f"expected a value at {text[position : position + 20]!r}")
        if found[0] in _WORDS:
            return _WORDS[found[0]], found.end()
        return read_number(found[0], f" is no number; text stands between {self.QUOTE}"), found.end()

    def _string(self, text: str, position: int) -> tuple[str, int]:
        start = position + len(self.QUOTE)
        end = text.find(self.QUOTE, start)
        if end < 0:
            raise ValueError(f"no {self.QUOTE} at the end of a string")
        return text[start:end], end + len(self.QUOTE)

    def _next(self, text: str, position: int, closing: str) -> int:
        """Return the position of the next item, or of the closing bracket."""
        position = skip_space(text, position)
        if text.startswith(",", position):
            return skip_space(text, position + 1)
        if not text.startswith(closing, position):
            raise ValueError(f"expected , or {closing} at {text[position : position + 20]!r}")
        return position


class FunctionGemma(Gemma4):
    """`<start_function_call>call:search{query:<escape>rain<escape>,limit:3}<end_function_call>`, once per call."""

    OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
