"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

Values have no quotes and no types; the schema determines the types. GLM-4.5 and 4.6 write each tag on a line, GLM-4.7
without line breaks.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks
from agentfactory.rollout.text.parsers.parser import Arguments, Call, NativeParser, Reading, find_spec, parameter_schema
from agentfactory.rollout.text.parsers.values import convert, skip_space, write_value


class Glm(NativeParser):
    """`<tool_call>search`, then `<arg_key>query</arg_key>` and `<arg_value>rain</arg_value>` for each argument, and
    `</tool_call>`, each on a line."""

    SUFFIX: ClassVar[str] = ""
    """Suffix of each tag's name."""
    SEPARATOR: ClassVar[str] = ""
    """Tag after the tool's name."""
    BLOCK: ClassVar[tuple[str, str]] = ("", "")
    """Tags around all calls of a turn."""

    def __init__(self) -> None:
        self._call, self._call_end = self._tags("tool_call")
        self._key, self._key_end = self._tags("arg_key")
        self._value, self._value_end = self._tags("arg_value")
        # a closing tag inside a value, as in XML code, does not precede another key or the end of the call
        self._ending = re.compile(rf"{self._value_end}(?=\s*(?:{self._key}|{self._call_end}))")

    def _tags(self, name: str) -> tuple[str, str]:
        return f"<{name}{self.SUFFIX}>", f"</{name}{self.SUFFIX}>"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Values of tools or parameters missing in `specs` are strings."""

        def read_call(position: int) -> tuple[list[Call], int]:
            call, position = self._read_call(text, position, specs)
            return [call], position

        if not self.BLOCK[0]:
            return read_blocks(text, self._call, self._call_end, read_call)

        def read_block(position: int) -> tuple[list[Call], int]:
            calls: list[Call] = []
            position = skip_space(text, position)
            while not calls or text.startswith(self._call, position):
                found, position = read_call(expect(text, position, self._call, self.BLOCK[0]))
                calls += found
                position = skip_space(text, position)
            return calls, expect(text, position, self.BLOCK[1], self._call_end)

        return read_blocks(text, *self.BLOCK, read_block)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        written = "\n".join(self._write_call(*call) for call in calls)
        return f"{self.BLOCK[0]}\n{written}\n{self.BLOCK[1]}" if self.BLOCK[0] else written

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {self.write([('tool_name', {'argument_name': 'value'})], specs)}"

    def _write_call(self, name: str, arguments: Arguments) -> str:
        given = [
            f"{self._key}{key}{self._key_end}\n{self._value}{write_value(value)}{self._value_end}\n"
            for key, value in arguments.items()
        ]
        return f"{self._call}{name}{self.SEPARATOR}\n{''.join(given)}{self._call_end}"

    def _read_call(self, text: str, position: int, specs: Sequence[ToolSpec]) -> tuple[Call, int]:
        found = _NAME.match(text, position)
        if found is None:
            raise ValueError(f"no name after {self._call}")
        name = found[1]
        spec = find_spec(name, specs)
        position = skip_space(text, found.end())
        if self.SEPARATOR:
            position = skip_space(text, expect(text, position, self.SEPARATOR, "the name"))
        arguments: Arguments = {}
        while text.startswith(self._key, position):
            start = position + len(self._key)
            end = text.find(self._key_end, start)
            if end < 0:
                raise ValueError(f"no {self._key_end} after {self._key}")
            key = text[start:end].strip()
            if key in arguments:
                raise ValueError(f"the argument {key} is given twice")
            start = expect(text, end + len(self._key_end), self._value, self._key_end)
            ending = self._ending.search(text, start)
            if ending is None:
                raise ValueError(f"no {self._value_end} after the value of {key}")
            value = text[start : ending.start()]
            arguments[key] = value if spec is None else convert(value, parameter_schema(spec, key), spec.parameters)
            position = skip_space(text, ending.end())
        return (name, arguments), expect(text, position, self._call_end, f"the arguments of {name}")


_NAME = re.compile(r"\s*([^\s<>]+)")
