"""Build the conversations for a small network's SFT."""

from typing import Any


def add_call(
    messages: list[dict[str, Any]],
    name: str,
    arguments: dict[str, Any],
    shown: str | list[dict[str, Any]],
    thought: str = "",
) -> None:
    """Append a call of the tool `name`, after a `thought`, and its result `shown` (text, or parts of a message) to a
    conversation."""
    call = call_message(name, arguments, len(messages), thought)
    answer = {"role": "tool", "name": name, "tool_call_id": call["tool_calls"][0]["id"], "content": shown}
    messages.extend((call, answer))


def call_message(name: str, arguments: dict[str, Any], number: int, thought: str = "") -> dict[str, Any]:
    """Return the message that calls the tool `name` after a `thought`; `number` is its index in the conversation."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}
