"""Formats whose values stand between tags, without quotes and mostly without types, which the schema determines.
Qwen3-Coder's XML, which Qwen3.5 and later and Nemotron 3 write too, and Seed-OSS with other outer tags; GLM-4.5 and
later, and Hunyuan 3 with other names; MiniMax M2, and DeepSeek V3.2 and V4."""

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import Block, Blocks, expect
from agentfactory.rollout.text.parsers.parser import Arguments, Call, FormatError, Reading, find_spec, parameter_schema
from agentfactory.rollout.text.parsers.values import convert, read_json, skip_space, write_value

_PLACES = {
    "{name}": r"\s*(?P<name>[^\s<>\"]+)\s*",
    "{key}": r"(?P<key>[^<>\"\n]+)",
    "{text}": r"(?:\s+string=\"(?P<text>true|false)\")?\s*",
}


class TaggedValues(Blocks):
    """Subclasses give the text around and between calls, around the parameters of a call, and around a value, as the
    template writes it. Line breaks in it may be missing in a model's turn. `{text}` says whether the value is text or
    JSON. ONE: each call has a block of its own. Values of unknown tools are strings, unless the call has their type."""

    BLOCK: ClassVar[tuple[str, str]]
    CALL: ClassVar[tuple[str, str]]
    PARAMETER: ClassVar[tuple[str, str]]
    ONE: ClassVar[bool] = False
    BETWEEN: ClassVar[str] = ""

    def __init__(self) -> None:
        self.OPEN, self.CLOSE = (tag.strip() for tag in self.BLOCK)
        self._call_end, self._value_end = self.CALL[1].strip(), self.PARAMETER[1].strip()
        self._call, self._parameter = _pattern(self.CALL[0]), _pattern(self.PARAMETER[0])
        self._call_begin, begin = (tags[0].partition("{")[0] for tags in (self.CALL, self.PARAMETER))
        # a closing tag inside a value, as in XML code, does not precede another parameter or the end of the call
        tag, space, _ = begin.partition(" ")
        parameter = re.escape(tag) + r"\s" * bool(space)
        call_end = re.escape(self._call_end or self.CLOSE)
        self._ending = re.compile(rf"{re.escape(self._value_end)}(?=\s*(?:{parameter}|{call_end}))")

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        found = super().read(text, specs)
        if self.ONE and self._call_begin and self._call_begin in found.content:
            raise FormatError(f"Malformed tool call: {self._call_begin} without {self.OPEN} before it")
        return found

    def read_block(self, text: str, position: int, specs: Sequence[ToolSpec], ids: list[str]) -> Block:
        calls: list[Call] = []
        position = skip_space(text, position)
        while not calls or not (self.ONE or text.startswith(self.CLOSE, position)):
            found = self._call.match(text, position)
            if found is None:
                where = f"where a call or {self.CLOSE} has to be" if calls else f"after {self.OPEN}"
                raise ValueError(f"no {self.CALL[0].strip().format(name='name')} {where}")
            arguments, position = self._read_arguments(text, found.end(), find_spec(found["name"], specs))
            after = f"the parameters of {found['name']}"
            if self._call_end:
                position, after = expect(text, position, self._call_end, after), self._call_end
            calls.append((found["name"], arguments))
            position = skip_space(text, position)
        return calls, expect(text, position, self.CLOSE, after)

    def _read_arguments(self, text: str, position: int, spec: ToolSpec | None) -> tuple[Arguments, int]:
        arguments: Arguments = {}
        position = skip_space(text, position)
        while (given := self._parameter.match(text, position)) is not None:
            key = given["key"].strip()
            if key in arguments:
                raise ValueError(f"the parameter {key} is given twice")
            ending = self._ending.search(text, given.end())
            if ending is None:
                raise ValueError(f"no {self._value_end} after the value of {key}")
            value = text[given.end() : ending.start()]
            if self.PARAMETER[0].endswith("\n"):
                # one line break may be that of both tags
                value = value.removeprefix("\n").removesuffix("\n")
            kind = given.groupdict().get("text")
            if kind == "false":
                arguments[key], end = read_json(value, skip_space(value, 0))
                if skip_space(value, end) < len(value):
                    raise ValueError(f'the value of {key} has more than one JSON value; text has string="true"')
            elif kind == "true" or spec is None:
                arguments[key] = value
            else:
                arguments[key] = convert(value, parameter_schema(spec, key), spec.parameters)
            position = skip_space(text, ending.end())
        return arguments, position

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        written = [f"{self.CALL[0].format(name=name)}{self._write(given)}{self.CALL[1]}" for name, given in calls]
        if self.ONE:
            return self.BETWEEN.join(self.BLOCK[0] + call + self.BLOCK[1] for call in written)
        return self.BLOCK[0] + self.BETWEEN.join(written) + self.BLOCK[1]

    def _write(self, arguments: Arguments) -> str:
        written = ""
        for key, value in arguments.items():
            is_text = json.dumps(isinstance(value, str))
            begin = self.PARAMETER[0].format(key=key, text=f' string="{is_text}"')
            written += begin + write_value(value) + self.PARAMETER[1]
        return written

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = self.write([("tool_name", {"parameter_name": "value"})], specs)
        return f"Write each call as {call}" if self.ONE else f"Write calls as {call}"


class Qwen3Coder(TaggedValues):
    BLOCK = "<tool_call>\n", "</tool_call>"
    CALL = "<function={name}>\n", "</function>\n"
    PARAMETER = "<parameter={key}>\n", "\n</parameter>\n"
    ONE, BETWEEN = True, "\n"


class SeedOss(Qwen3Coder):
    BLOCK = "<seed:tool_call>\n", "</seed:tool_call>"
    PARAMETER = "<parameter={key}>", "</parameter>\n"


class Glm(TaggedValues):
    """`<tool_call>search`, then `<arg_key>query</arg_key>` and `<arg_value>rain</arg_value>` for each argument, and
    `</tool_call>`. GLM-4.5 and 4.6 write each tag on a line, GLM-4.7 without line breaks."""

    BLOCK = "<tool_call>", "</tool_call>"
    CALL = "{name}\n", ""
    PARAMETER = "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"
    ONE, BETWEEN = True, "\n"


class Hy3(TaggedValues):
    """GLM's calls within `<tool_calls>`, with `<tool_sep>` after the name; all tags end with `:opensource`."""

    BLOCK = "<tool_calls:opensource>\n", "\n</tool_calls:opensource>"
    CALL = "<tool_call:opensource>{name}<tool_sep:opensource>\n", "</tool_call:opensource>"
    PARAMETER = "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n"
    BETWEEN = "\n"


class MiniMax(TaggedValues):
    BLOCK = "<minimax:tool_call>\n", "</minimax:tool_call>"
    CALL = '<invoke name="{name}">\n', "</invoke>\n"
    PARAMETER = '<parameter name="{key}">', "</parameter>\n"


class DeepSeekV32(TaggedValues):
    """`<｜DSML｜function_calls>`, then `<｜DSML｜invoke name="search">`, and `<｜DSML｜parameter name="query"
    string="true">rain</｜DSML｜parameter>`. Values with `string="false"` are JSON."""

    BLOCK = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
    CALL = '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n"
    PARAMETER = '<｜DSML｜parameter name="{key}"{text}>', "</｜DSML｜parameter>\n"


class DeepSeekV4(DeepSeekV32):
    BLOCK = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"


def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of a text with places for names; its line breaks may be any white space."""
    parts = re.split(r"(\{\w+\}|\s+)", template.strip())
    spaces = {"\n": r"\s*", " ": r"\s+"}
    return re.compile("".join(_PLACES.get(part) or spaces.get(part) or re.escape(part) for part in parts))
