"""Kimi K2: calls between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`.

A call's id, `functions.NAME:NUMBER`, names the tool, and its result refers to the id. The number counts the
conversation's calls from 0.
"""

import json
import re
from collections.abc import Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks, read_object
from agentfactory.rollout.text.parsers.parser import Call, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import skip_space

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*((?:functions\.)?([^\s<>:]+):\d+)\s*")


class Kimi(NativeParser):
    """`<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "rain"}<|tool_call_end|>`, in a
    section of calls."""

    def call_id(self, name: str, number: int) -> str:
        """See Parser."""
        return f"functions.{name}:{number}"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """See Parser."""
        ids: list[str] = []

        def read_section(position: int) -> tuple[list[Call], int]:
            calls: list[Call] = []
            position = skip_space(text, position)
            while not calls or text.startswith(CALL, position):
                position = expect(text, position, CALL, OPEN)
                found = _ID.match(text, position)
                if found is None:
                    raise ValueError(f"no id such as functions.tool_name:0 after {CALL}")
                arguments, end = read_object(text, expect(text, found.end(), ARGUMENTS, "the id"))
                ids.append(found[1])
                calls.append((found[2], arguments))
                position = skip_space(text, expect(text, end, CALL_END, "the arguments"))
            return calls, expect(text, position, CLOSE, CALL_END)

        found = read_blocks(text, OPEN, CLOSE, read_section)
        return Reading(found.content, found.calls, ids=ids)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        written = [
            f"{CALL}{self.call_id(name, number)}{ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
            for number, (name, arguments) in enumerate(calls)
        ]
        return f"{OPEN}{''.join(written)}{CLOSE}"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return f"Write calls as {OPEN}{CALL}functions.tool_name:0{ARGUMENTS}{{...}}{CALL_END}{CLOSE}"
