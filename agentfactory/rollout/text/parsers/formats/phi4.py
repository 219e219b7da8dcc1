"""Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or `functools[...]` under templates
that ask for it."""

from agentfactory.rollout.text.parsers.blocks import JsonList


class Phi4(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]<|/tool_call|>`. llama.cpp's template for it
    writes each call on its own, without the list."""

    OPEN, CLOSE, LONE = "<|tool_call|>", "<|/tool_call|>", True
    marks = ("<|tool_call|>", "<|/tool_call|>")


class Phi4Mini(JsonList):
    """`functools[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "functools", ""
