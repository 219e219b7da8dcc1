"""Builds the conversations from which a small network learns."""

from typing import Any


def add_call(messages: list[dict[str, Any]], name: str, arguments: dict[str, Any], shown: str) -> None:
    """Append a call of the tool `name` to a conversation, and what it showed."""
    call = call_message(name, arguments, len(messages))
    answer = {"role": "tool", "name": name, "tool_call_id": call["tool_calls"][0]["id"], "content": shown}
    messages.extend((call, answer))


def call_message(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the message that calls the tool `name`; `number` is its place in the conversation."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
