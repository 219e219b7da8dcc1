"""Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or `functools[...]` under templates
that ask for it."""

from agentfactory.rollout.parsers.blocks import JsonList


class Phi4(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]<|/tool_call|>`."""

    OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
    marks = ("<|tool_call|>", "<|/tool_call|>")


class Phi4Mini(JsonList):
    """`functools[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "functools", ""
