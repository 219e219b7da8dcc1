"""Formats with all calls in one JSON list between marks: Granite 3, Hunyuan, Nemotron Nano 2, Phi-4-mini."""

from agentfactory.rollout.text.parsers.blocks import JsonList
from agentfactory.rollout.text.parsers.formats.glm import Glm


class Granite(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "<|tool_call|>", ""
    marks = ("<|tool_call|>",)


class Hunyuan(JsonList):
    """`<tool_calls>[{"name": "search", "arguments": {"query": "rain"}}]</tool_calls>`."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


class Hy3(Glm):
    """GLM's calls within `<tool_calls>`, with `<tool_sep>` after the tool's name; the names of all tags end with
    `:opensource`."""

    SUFFIX = ":opensource"
    SEPARATOR = "<tool_sep:opensource>"
    BLOCK = ("<tool_calls:opensource>", "</tool_calls:opensource>")


class Nemotron(JsonList):
    """`<TOOLCALL>[{"name": "search", "arguments": {"query": "rain"}}]</TOOLCALL>`."""

    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"


class Phi4(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]<|/tool_call|>`. llama.cpp's template for it
    writes each call separately, without the list."""

    OPEN, CLOSE, LONE = "<|tool_call|>", "<|/tool_call|>", True
    marks = ("<|tool_call|>", "<|/tool_call|>")


class Phi4Mini(JsonList):
    """`functools[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "functools", ""
