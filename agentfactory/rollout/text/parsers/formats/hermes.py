"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's text.

The format comes from NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5, Qwen3 and Granite 4 also
write it.
"""

import json
from collections.abc import Sequence

from agentfactory.rollout.text.parsers.blocks import expect, read_blocks, read_call_object
from agentfactory.rollout.text.parsers.parser import Call, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import read_json, skip_space
from agentfactory.tools.messages import ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(NativeParser):
    """`<tool_call>{"name": "search", "arguments": {"query": "rain"}}</tool_call>`, once per call."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """See Parser."""

        def read_call(position: int) -> tuple[list[Call], int]:
            value, end = read_json(text, skip_space(text, position))
            end = expect(text, end, CLOSE, "the JSON object")
            return [read_call_object(value, "arguments")], end

        return read_blocks(text, OPEN, CLOSE, read_call)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        objects = [json.dumps({"name": n, "arguments": arguments}, ensure_ascii=False) for n, arguments in calls]
        return "\n".join(f"{OPEN}\n{call}\n{CLOSE}" for call in objects)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return f'Write each call as {OPEN}\n{{"name": "tool_name", "arguments": {{...}}}}\n{CLOSE}'
