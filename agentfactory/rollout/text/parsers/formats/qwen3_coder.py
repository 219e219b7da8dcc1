"""Qwen3-Coder's XML: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Qwen3-Coder, Qwen3.5 and later, and Nemotron 3 write it, and Seed-OSS with other outer tags. Values have no quotes and
no types; the schema determines the types.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import read_blocks
from agentfactory.rollout.text.parsers.parser import (
    Arguments,
    Call,
    FormatError,
    NativeParser,
    Reading,
    find_spec,
    parameter_schema,
)
from agentfactory.rollout.text.parsers.values import convert, skip_space, write_value

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# a closing tag inside a value, as in XML code, does not precede another parameter or the end of the call
_VALUE_END = re.compile(rf"{PARAMETER_END}(?=\s*(?:{PARAMETER}|{FUNCTION_END}))")
_NAME = re.compile(r"([^<>\n]+)>")


class Qwen3Coder(NativeParser):
    """`<tool_call>`, `<function=search>`, `<parameter=query>`, a value, and the closing tags, each on a line."""

    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"
    BREAK: ClassVar[str] = "\n"
    """Text on both sides of a value."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Values of tools or parameters missing in `specs` are strings."""

        def read_call(position: int) -> tuple[list[Call], int]:
            call, position = self._read_call(text, position, specs)
            return [call], position

        found = read_blocks(text, self.OPEN, self.CLOSE, read_call)
        if FUNCTION in found.content:
            raise FormatError(f"Malformed tool call: {FUNCTION} without {self.OPEN} before it")
        return found

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "\n".join(self._write_call(*call) for call in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {self._write_call('tool_name', {'parameter_name': 'value'})}"

    def _write_call(self, name: str, arguments: Arguments) -> str:
        given = [
            f"{PARAMETER}{key}>{self.BREAK}{write_value(value)}{self.BREAK}{PARAMETER_END}\n"
            for key, value in arguments.items()
        ]
        return f"{self.OPEN}\n{FUNCTION}{name}>\n{''.join(given)}{FUNCTION_END}\n{self.CLOSE}"

    def _read_call(self, text: str, position: int, specs: Sequence[ToolSpec]) -> tuple[Call, int]:
        position = skip_space(text, position)
        found = _NAME.match(text, position + len(FUNCTION)) if text.startswith(FUNCTION, position) else None
        if found is None:
            raise FormatError(f"no {FUNCTION}name> after {self.OPEN}")
        name = found[1]
        spec = find_spec(name, specs)
        arguments: Arguments = {}
        position = skip_space(text, found.end())
        while text.startswith(PARAMETER, position):
            found = _NAME.match(text, position + len(PARAMETER))
            if found is None:
                raise FormatError(f"no name after {PARAMETER}")
            key = found[1]
            if key in arguments:
                raise FormatError(f"the parameter {key} is given twice")
            end = _VALUE_END.search(text, found.end())
            if end is None:
                raise FormatError(f"no {PARAMETER_END} after the value of {key}")
            # one line break may be that of both tags
            value = text[found.end() : end.start()].removeprefix(self.BREAK).removesuffix(self.BREAK)
            if spec is None:
                arguments[key] = value
            else:
                arguments[key] = convert(value, parameter_schema(spec, key), spec.parameters)
            position = skip_space(text, end.end())
        if not text.startswith(FUNCTION_END, position):
            raise FormatError(f"no {FUNCTION_END} after the parameters of {name}")
        position = skip_space(text, position + len(FUNCTION_END))
        if not text.startswith(self.CLOSE, position):
            raise FormatError(f"no {self.CLOSE} after {FUNCTION_END}")
        return (name, arguments), position + len(self.CLOSE)


class SeedOss(Qwen3Coder):
    """The same between `<seed:tool_call>` tags, without line breaks around values."""

    OPEN, CLOSE, BREAK = "<seed:tool_call>", "</seed:tool_call>", ""
