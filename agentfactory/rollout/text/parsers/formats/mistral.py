"""Mistral: `[TOOL_CALLS]` and a JSON list (tokenizers before v11), or the name, `[ARGS]` and the arguments (v11 and
later).

The sources are the encoders of PyPI `mistral-common`, `InstructTokenizerV3` and `InstructTokenizerV11`.
"""

import json
import re
from collections.abc import Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import JsonList, expect, read_blocks, read_object
from agentfactory.rollout.text.parsers.parser import Call, NativeParser, Reading

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*")
_ID = re.compile(r"[A-Za-z0-9]{9}")


def mistral_id(number: int) -> str:
    """Return the id of a chain's call: nine digits, since Mistral's templates require nine letters or digits."""
    return f"{number:09d}"


class MistralV3(JsonList):
    """`[TOOL_CALLS][{"name": "search", "arguments": {"query": "rain"}, "id": "000000001"}]`. The model may leave out
    the ids."""

    OPEN, CLOSE = OPEN, ""

    def call_id(self, name: str, number: int) -> str:
        return mistral_id(number)


class Mistral(NativeParser):
    """`[TOOL_CALLS]search[ARGS]{"query": "rain"}`, once per call. `[CALL_ID]` and an id may follow the name."""

    def call_id(self, name: str, number: int) -> str:
        return mistral_id(number)

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:

        def read_call(position: int) -> tuple[list[Call], int]:
            name = _NAME.match(text, position)
            if name is None:
                raise ValueError(f"no tool's name after {OPEN}")
            position = name.end()
            if text.startswith(CALL_ID, position):
                identity = _ID.match(text, position + len(CALL_ID))
                if identity is None:
                    raise ValueError(f"no id of nine letters or digits after {CALL_ID}")
                position = identity.end()
            arguments, end = read_object(text, expect(text, position, ARGS, "the name"))
            return [(name[1], arguments)], end

        return read_blocks(text, OPEN, ARGS, read_call)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "".join(f"{OPEN}{name}{ARGS}{json.dumps(given, ensure_ascii=False)}" for name, given in calls)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return f"Write each call as {OPEN}tool_name{ARGS}{{...}}, with the arguments as a JSON object"
