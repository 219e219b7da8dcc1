"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's text.

The format comes from NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5, Qwen3 and Granite 4 also
write it, and GigaChat 3.1 with another mark.
"""

import json
from collections.abc import Sequence
from typing import ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks, read_call_object
from agentfactory.rollout.text.parsers.parser import Call, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import read_json, skip_space


class Hermes(NativeParser):
    """`<tool_call>{"name": "search", "arguments": {"query": "rain"}}</tool_call>`, once per call."""

    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"
    BREAK: ClassVar[str] = "\n"
    """Text on both sides of the object."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:

        def read_call(position: int) -> tuple[list[Call], int]:
            value, end = read_json(text, skip_space(text, position))
            end = expect(text, end, self.CLOSE, "the JSON object")
            return [read_call_object(value, "arguments")], end

        return read_blocks(text, self.OPEN, self.CLOSE, read_call)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        objects = [json.dumps({"name": n, "arguments": arguments}, ensure_ascii=False) for n, arguments in calls]
        return "\n".join(f"{self.OPEN}{self.BREAK}{call}{self.BREAK}{self.CLOSE}" for call in objects)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = '{"name": "tool_name", "arguments": {...}}'
        return f"Write each call as {self.OPEN}{self.BREAK}{call}{self.BREAK}{self.CLOSE}"


class GigaChat(Hermes):
    """`<|function_call|>{"name": "search", "arguments": {"query": "rain"}}`."""

    OPEN, CLOSE, BREAK = "<|function_call|>", "", ""
