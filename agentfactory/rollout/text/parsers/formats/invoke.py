"""Named tags, `<invoke name="search"><parameter name="query">rain</parameter></invoke>`: MiniMax M2, and
DeepSeek V3.2 and V4."""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks
from agentfactory.rollout.text.parsers.parser import Arguments, Call, NativeParser, Reading, find_spec, parameter_schema
from agentfactory.rollout.text.parsers.values import convert, read_json, skip_space, write_value


class Invoke(NativeParser):
    """Calls between the tags of a BLOCK. Subclasses set these tags, and the MARK before tag names."""

    BLOCK: ClassVar[str]
    MARK: ClassVar[str] = ""

    def __init__(self) -> None:
        self._open, self._close = f"<{self.BLOCK}>", f"</{self.BLOCK}>"
        self._invoke_end, self._parameter_end = f"</{self.MARK}invoke>", f"</{self.MARK}parameter>"
        self._invoke = re.compile(rf'<{self.MARK}invoke\s+name="([^"<>\n]+)"\s*>')
        self._parameter = re.compile(rf'<{self.MARK}parameter\s+name="([^"<>\n]+)"(?:\s+string="(true|false)")?\s*>')
        # a closing tag inside a value, as in XML code, does not precede another parameter or the end of the call
        self._ending = re.compile(rf"{self._parameter_end}(?=\s*(?:<{self.MARK}parameter\s|{self._invoke_end}))")

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Values of tools or parameters missing in `specs` are strings, unless the call has their type."""

        def read_block(position: int) -> tuple[list[Call], int]:
            calls: list[Call] = []
            position = skip_space(text, position)
            while not calls or not text.startswith(self._close, position):
                call, position = self._read_call(text, position, specs)
                calls.append(call)
                position = skip_space(text, position)
            return calls, position + len(self._close)

        return read_blocks(text, self._open, self._close, read_block)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return f"{self._open}\n{''.join(self._write_call(*call) for call in calls)}{self._close}"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write calls as {self.write([('tool_name', {'parameter_name': 'value'})], specs)}"

    def attributes(self, value: Any) -> str:
        """Return the attributes of a parameter's tag besides the name."""
        return ""

    def _write_call(self, name: str, arguments: Arguments) -> str:
        given = [
            f'<{self.MARK}parameter name="{key}"{self.attributes(value)}>{write_value(value)}{self._parameter_end}\n'
            for key, value in arguments.items()
        ]
        return f'<{self.MARK}invoke name="{name}">\n{"".join(given)}{self._invoke_end}\n'

    def _read_call(self, text: str, position: int, specs: Sequence[ToolSpec]) -> tuple[Call, int]:
        found = self._invoke.match(text, position)
        if found is None:
            raise ValueError(f'no <{self.MARK}invoke name="..."> where a call or {self._close} has to be')
        name = found[1]
        spec = find_spec(name, specs)
        arguments: Arguments = {}
        position = skip_space(text, found.end())
        while (given := self._parameter.match(text, position)) is not None:
            key, is_text = given[1], given[2]
            if key in arguments:
                raise ValueError(f"the parameter {key} is given twice")
            ending = self._ending.search(text, given.end())
            if ending is None:
                raise ValueError(f"no {self._parameter_end} after the value of {key}")
            value = text[given.end() : ending.start()]
            if is_text == "true":
                arguments[key] = value
            elif is_text == "false":
                arguments[key] = _json(key, value)
            else:
                schema = {"type": "string"} if spec is None else parameter_schema(spec, key)
                arguments[key] = convert(value, schema, {} if spec is None else spec.parameters)
            position = skip_space(text, ending.end())
        return (name, arguments), expect(text, position, self._invoke_end, f"the parameters of {name}")


class MiniMax(Invoke):
    """`<minimax:tool_call>`, then `<invoke name="search">`, `<parameter name="query">rain</parameter>`, `</invoke>`.
    The schema determines the types of values."""

    BLOCK = "minimax:tool_call"


class DeepSeekV32(Invoke):
    """`<｜DSML｜function_calls>`, then `<｜DSML｜invoke name="search">`, and `<｜DSML｜parameter name="query"
    string="true">rain</｜DSML｜parameter>`. Values with `string="false"` are JSON."""

    BLOCK, MARK = "｜DSML｜function_calls", "｜DSML｜"

    def attributes(self, value: Any) -> str:
        return f' string="{json.dumps(isinstance(value, str))}"'


class DeepSeekV4(DeepSeekV32):
    """The same as DeepSeek V3.2, between `<｜DSML｜tool_calls>` tags."""

    BLOCK = "｜DSML｜tool_calls"


def _json(key: str, text: str) -> Any:
    value, end = read_json(text, skip_space(text, 0))
    if skip_space(text, end) < len(text):
        raise ValueError(f'the value of {key} has more than one JSON value; text has string="true"')
    return value
