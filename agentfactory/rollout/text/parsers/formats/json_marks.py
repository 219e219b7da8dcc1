"""Formats with calls as JSON after or between marks: one call each, as Hermes, GigaChat and later Mistral models write
them, or all calls in one list."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import Block, Blocks, expect, match, read_call_object, read_object
from agentfactory.rollout.text.parsers.parser import Arguments, Call, Reading
from agentfactory.rollout.text.parsers.values import KINDS, read_json, skip_space


class Hermes(Blocks):
    """`<tool_call>{"name": "search", "arguments": {"query": "rain"}}</tool_call>`, once per call. BREAK is the text on
    both sides of the object."""

    OPEN, CLOSE, BREAK = "<tool_call>", "</tool_call>", "\n"

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        value, end = read_json(text, skip_space(text, position))
        end = expect(text, end, self.CLOSE, "the JSON object")
        return [read_call_object(value, "arguments")], end

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        objects = [json.dumps({"name": n, "arguments": arguments}, ensure_ascii=False) for n, arguments in calls]
        return "\n".join(f"{self.OPEN}{self.BREAK}{call}{self.BREAK}{self.CLOSE}" for call in objects)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = '{"name": "tool_name", "arguments": {...}}'
        return f"Write each call as {self.OPEN}{self.BREAK}{call}{self.BREAK}{self.CLOSE}"


class GigaChat(Hermes):
    OPEN, CLOSE, BREAK = "<|function_call|>", "", ""


class JsonList(Blocks):
    """`OPEN[{"name": "search", "arguments": {"query": "rain"}}]CLOSE`: all calls of a turn are one JSON list. LONE: a
    call may be without the list. CLOSE_ENDS_TURN: CLOSE is the end-of-turn token, which a turn's text does not have."""

    LONE: ClassVar[bool] = False
    CLOSE_ENDS_TURN: ClassVar[bool] = False

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        value, end = read_json(text, skip_space(text, position))
        if self.LONE and isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            raise ValueError(f"expected a JSON list of calls, not {KINDS[type(value)]}")
        if not value:
            raise ValueError("the list of calls is empty")
        calls = [self.read_call(call) for call in value]
        if not self.CLOSE or (self.CLOSE_ENDS_TURN and skip_space(text, end) == len(text)):
            return calls, end
        return calls, expect(text, end, self.CLOSE, "the list of calls")

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        objects = [self.write_call(*call) for call in calls]
        return f"{self.OPEN}{json.dumps(objects, ensure_ascii=False)}{self.CLOSE}"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = json.dumps(self.write_call("tool_name", {})).replace("{}", "{...}")
        return f"Write the calls as {self.OPEN}[{call}]{self.CLOSE}"

    def read_call(self, call: object) -> Call:
        return read_call_object(call, "arguments", "parameters")

    def write_call(self, name: str, arguments: Arguments) -> dict[str, Any]:
        return {"name": name, "arguments": arguments}


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
    Text is between marks, too; within a call, these are part of its arguments."""

    OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
    TEXT_MARKS = re.compile(r"<\|(?:START|END)_(?:TEXT|RESPONSE)\|>")
    call_ids = "{number}"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        found = super().read(text, specs)
        return replace(found, content=self.TEXT_MARKS.sub("", found.content).strip())

    def read_call(self, call: object) -> Call:
        return read_call_object(call, "parameters", name_key="tool_name")

    def write_call(self, name: str, arguments: Arguments) -> dict[str, Any]:
        return {"tool_name": name, "parameters": arguments}


class Granite(JsonList):
    OPEN, CLOSE = "<|tool_call|>", ""
    marks = ("<|tool_call|>",)


class Hunyuan(JsonList):
    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


class Nemotron(JsonList):
    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"


class Phi4(JsonList):
    # llama.cpp's template for it writes each call separately
    OPEN, CLOSE, LONE = "<|tool_call|>", "<|/tool_call|>", True
    marks = ("<|tool_call|>", "<|/tool_call|>")


class Phi4Mini(JsonList):
    OPEN, CLOSE = "functools", ""


class MistralV3(JsonList):
    """`[TOOL_CALLS][{"name": "search", "arguments": {"query": "rain"}, "id": "000000001"}]`. The model may leave out
    the ids."""

    OPEN, CLOSE = "[TOOL_CALLS]", ""
    call_ids = "{number:09d}"  # Mistral's templates require nine letters or digits


class Mistral(MistralV3):
    """`[TOOL_CALLS]search[ARGS]{"query": "rain"}`, once per call, from tokenizers v11 on. `[CALL_ID]` and an id may
    follow the name. The source is PyPI `mistral-common`."""

    # nothing closes a call, but an [ARGS] outside a call is refused, as a closing tag without its opening one is
    CLOSE, CALL_ID = "[ARGS]", "[CALL_ID]"
    NAME, ID = re.compile(r"\s*([^\s\[\]{}]+)\s*"), re.compile(r"[A-Za-z0-9]{9}")

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        name = match(self.NAME, text, position, f"no tool's name after {self.OPEN}")
        position = name.end()
        if text.startswith(self.CALL_ID, position):
            position += len(self.CALL_ID)
            position = match(self.ID, text, position, f"no id of nine letters or digits after {self.CALL_ID}").end()
        arguments, end = read_object(text, expect(text, position, self.CLOSE, "the name"))
        return [(name[1], arguments)], end

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "".join(f"{self.OPEN}{name}{self.CLOSE}{json.dumps(given, ensure_ascii=False)}" for name, given in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {self.OPEN}tool_name{self.CLOSE}{{...}}, with the arguments as a JSON object"
