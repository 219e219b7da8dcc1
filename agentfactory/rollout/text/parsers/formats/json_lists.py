"""Formats with all calls in one JSON list between marks: Apertus, Cohere's, Granite 3, Hunyuan, Nemotron Nano 2,
Phi-4-mini."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import JsonList, read_call_object
from agentfactory.rollout.text.parsers.parser import Arguments, Call, Reading
from agentfactory.rollout.text.parsers.values import KINDS


class Apertus(JsonList):
    """`<|tools_prefix|>[{"search": {"query": "rain"}}]<|tools_suffix|>`."""

    OPEN, CLOSE, CLOSE_ENDS_TURN = "<|tools_prefix|>", "<|tools_suffix|>", True

    def read_call(self, call: object) -> Call:
        if not isinstance(call, dict) or len(call) != 1:
            found = f"{len(call)} keys" if isinstance(call, dict) else KINDS[type(call)]
            raise ValueError(f"expected an object with the tool's name as its only key, not {found}")
        ((name, arguments),) = call.items()
        if not name:
            raise ValueError("the tool's name is empty")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {name} must be a JSON object, not {KINDS[type(arguments)]}")
        return name, arguments

    def write_call(self, name: str, arguments: Arguments) -> dict[str, Any]:
        return {name: arguments}


class Cohere(JsonList):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "search", "parameters": {"query": "rain"}}]<|END_ACTION|>`.
    Text is between marks, too."""

    OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
    TEXT_MARKS = re.compile(r"<\|(?:START|END)_(?:TEXT|RESPONSE)\|>")

    def call_id(self, name: str, number: int) -> str:
        return str(number)

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Marks of text within a call are part of its arguments."""
        found = super().read(text, specs)
        return replace(found, content=self.TEXT_MARKS.sub("", found.content).strip())

    def read_call(self, call: object) -> Call:
        return read_call_object(call, "parameters", name_key="tool_name")

    def write_call(self, name: str, arguments: Arguments) -> dict[str, Any]:
        return {"tool_name": name, "parameters": arguments}


class Granite(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "<|tool_call|>", ""
    marks = ("<|tool_call|>",)


class Hunyuan(JsonList):
    """`<tool_calls>[{"name": "search", "arguments": {"query": "rain"}}]</tool_calls>`."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


class Nemotron(JsonList):
    """`<TOOLCALL>[{"name": "search", "arguments": {"query": "rain"}}]</TOOLCALL>`."""

    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"


class Phi4(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]<|/tool_call|>`. llama.cpp's template for it
    writes each call separately, without the list."""

    OPEN, CLOSE, LONE = "<|tool_call|>", "<|/tool_call|>", True
    marks = ("<|tool_call|>", "<|/tool_call|>")


class Phi4Mini(JsonList):
    """`functools[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "functools", ""
