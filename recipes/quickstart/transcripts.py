"""Build the conversations for a small network's SFT."""

import random
from typing import Any

from agentfactory.rollout.text.parsers import load_parser


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


def add_malformed_call(
    messages: list[dict[str, Any]], name: str, arguments: dict[str, Any], rng: random.Random
) -> None:
    """Append a call of which a random part is missing, and the error message that a rollout answers.

    Its loss weight is 0: the network learns to continue after such an error, not to make it.
    """
    parser = load_parser("hermes")
    written = parser.write([(name, arguments)], [])
    while True:
        start, end = sorted(rng.sample(range(len(written) + 1), 2))
        text = written[:start] + written[end:]
        if (error := parser.parse(text).error) is not None:
            break
    messages.append({"role": "assistant", "content": text, "weight": 0})
    messages.extend(parser.complaint(error))
