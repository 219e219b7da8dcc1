"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, arguments as JSON.

V3.2 and V4 write named tags instead: see `invoke.py`.
"""

import json
import re
from collections.abc import Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks, read_object
from agentfactory.rollout.text.parsers.parser import Arguments, Call, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import skip_space

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"\s*([^\s<>｜]+)[^\S\n]*")


class DeepSeekV31(NativeParser):
    """`<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "rain"}<｜tool▁call▁end｜>`, in a section of calls."""

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """See Parser."""

        def read_section(position: int) -> tuple[list[Call], int]:
            calls: list[Call] = []
            position = skip_space(text, position)
            while not calls or text.startswith(CALL, position):
                call, position = self.read_call(text, expect(text, position, CALL, OPEN))
                calls.append(call)
                position = skip_space(text, expect(text, position, CALL_END, "the arguments"))
            return calls, expect(text, position, CLOSE, CALL_END)

        return read_blocks(text, OPEN, CLOSE, read_section)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return OPEN + self.between.join(f"{CALL}{self.write_call(*call)}{CALL_END}" for call in calls) + CLOSE

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """See Parser."""
        return f"Write calls as {self.write([('tool_name', {'argument_name': 'value'})], specs)}"

    between = ""
    """Separator of calls."""

    def read_call(self, text: str, position: int) -> tuple[Call, int]:
        """Return the call at `position`, and the end position of its arguments. Raises ValueError."""
        name = _NAME.match(text, position)
        if name is None:
            raise ValueError(f"no tool's name after {CALL}")
        arguments, end = read_object(text, expect(text, name.end(), SEPARATOR, "the name"))
        return (name[1], arguments), end

    def write_call(self, name: str, arguments: Arguments) -> str:
        """Write the text between a call's tags."""
        return f"{name}{SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}"


class DeepSeekV3(DeepSeekV31):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>search`, the arguments in a `json` code block, and
    `<｜tool▁call▁end｜>`."""

    between = "\n"

    def read_call(self, text: str, position: int) -> tuple[Call, int]:
        """See DeepSeekV31."""
        position = expect(text, expect(text, position, "function", CALL), SEPARATOR, "function")
        name = _NAME.match(text, position)
        if name is None:
            raise ValueError(f"no tool's name after {SEPARATOR}")
        arguments, end = read_object(text, expect(text, name.end(), "```json", "the name"))
        return (name[1], arguments), expect(text, end, "```", "the arguments")

    def write_call(self, name: str, arguments: Arguments) -> str:
        """See DeepSeekV31."""
        return f"function{SEPARATOR}{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
