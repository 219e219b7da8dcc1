"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`. Granite 4 writes `hermes`."""

from agentfactory.rollout.text.parsers.blocks import JsonList


class Granite(JsonList):
    """`<|tool_call|>[{"name": "search", "arguments": {"query": "rain"}}]`."""

    OPEN, CLOSE = "<|tool_call|>", ""
    marks = ("<|tool_call|>",)
