"""Hunyuan: a JSON list between `<tool_calls>` tags (A13B), and GLM's tags within `<tool_calls>` (Hy3)."""

from agentfactory.rollout.text.parsers.blocks import JsonList
from agentfactory.rollout.text.parsers.formats.glm import Glm


class Hunyuan(JsonList):
    """`<tool_calls>[{"name": "search", "arguments": {"query": "rain"}}]</tool_calls>`."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


class Hy3(Glm):
    """`<tool_calls>`, and in it calls as GLM writes them, with `<tool_sep>` behind the tool's name; the names of all
    tags end with `:opensource`."""

    SUFFIX = ":opensource"
    SEPARATOR = "<tool_sep:opensource>"
    BLOCK = ("<tool_calls:opensource>", "</tool_calls:opensource>")
