"""Calls with JSON arguments in one section of a turn: Kimi K2, and DeepSeek V3, R1 and V3.1.

DeepSeek V3.2 and V4 write named tags instead: see `tagged_values.py`."""

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import Block, Blocks, expect, match, read_object
from agentfactory.rollout.text.parsers.parser import Arguments, Call
from agentfactory.rollout.text.parsers.values import skip_space

_NAME = re.compile(r"\s*([^\s<>｜]+)[^\S\n]*")
_ID = re.compile(r"\s*((?:functions\.)?([^\s<>:]+):\d+)\s*")


class Section(Blocks):
    """Calls between the tags CALL and CALL_END, with SEPARATOR before the arguments, in a section between OPEN and
    CLOSE. BETWEEN is the text between calls."""

    CALL: ClassVar[str]
    CALL_END: ClassVar[str]
    SEPARATOR: ClassVar[str]
    BETWEEN: ClassVar[str] = ""

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        calls: list[Call] = []
        position = skip_space(text, position)
        while not calls or text.startswith(self.CALL, position):
            call, position = self.read_call(text, expect(text, position, self.CALL, self.OPEN), ids)
            calls.append(call)
            position = skip_space(text, expect(text, position, self.CALL_END, "the arguments"))
        return calls, expect(text, position, self.CLOSE, self.CALL_END)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        written = [f"{self.CALL}{self.write_call(number, *call)}{self.CALL_END}" for number, call in enumerate(calls)]
        return self.OPEN + self.BETWEEN.join(written) + self.CLOSE

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write calls as {self.write([('tool_name', {'argument_name': 'value'})], specs)}"

    def read_call(self, text: str, position: int, ids: list[str]) -> tuple[Call, int]:
        """Return the call at `position`, and the end of its arguments; append its id, if any, to `ids`."""
        raise NotImplementedError

    def write_call(self, number: int, name: str, arguments: Arguments) -> str:
        """Write the text between a call's tags; `number` counts the turn's calls from 0."""
        raise NotImplementedError


class DeepSeekV31(Section):
    """`<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "rain"}<｜tool▁call▁end｜>`, in a section of calls."""

    OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def read_call(self, text: str, position: int, ids: list[str]) -> tuple[Call, int]:
        name = match(_NAME, text, position, f"no tool's name after {self.CALL}")
        arguments, end = read_object(text, expect(text, name.end(), self.SEPARATOR, "the name"))
        return (name[1], arguments), end

    def write_call(self, number: int, name: str, arguments: Arguments) -> str:
        return f"{name}{self.SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}"


class DeepSeekV3(DeepSeekV31):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>search`, arguments in a `json` code block, `<｜tool▁call▁end｜>`."""

    BETWEEN = "\n"

    def read_call(self, text: str, position: int, ids: list[str]) -> tuple[Call, int]:
        position = expect(text, expect(text, position, "function", self.CALL), self.SEPARATOR, "function")
        name = match(_NAME, text, position, f"no tool's name after {self.SEPARATOR}")
        arguments, end = read_object(text, expect(text, name.end(), "```json", "the name"))
        return (name[1], arguments), expect(text, end, "```", "the arguments")

    def write_call(self, number: int, name: str, arguments: Arguments) -> str:
        return f"function{self.SEPARATOR}{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"


class Kimi(Section):
    """`<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "rain"}<|tool_call_end|>`, in a
    section. A result refers to its call's id, `functions.NAME:NUMBER`, whose number counts the conversation's calls."""

    OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, SEPARATOR, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    call_ids = "functions.{name}:{number}"

    def read_call(self, text: str, position: int, ids: list[str]) -> tuple[Call, int]:
        found = match(_ID, text, position, f"no id such as functions.tool_name:0 after {self.CALL}")
        arguments, end = read_object(text, expect(text, found.end(), self.SEPARATOR, "the id"))
        ids.append(found[1])
        return (found[2], arguments), end

    def write_call(self, number: int, name: str, arguments: Arguments) -> str:
        return f"{self.call_id(name, number)}{self.SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = f"{self.CALL}functions.tool_name:0{self.SEPARATOR}{{...}}{self.CALL_END}"
        return f"Write calls as {self.OPEN}{call}{self.CLOSE}"
