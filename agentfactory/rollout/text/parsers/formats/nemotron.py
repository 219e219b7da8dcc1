"""Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`. Nemotron 3 writes `qwen3_coder`."""

from agentfactory.rollout.text.parsers.blocks import JsonList


class Nemotron(JsonList):
    """`<TOOLCALL>[{"name": "search", "arguments": {"query": "rain"}}]</TOOLCALL>`."""

    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
