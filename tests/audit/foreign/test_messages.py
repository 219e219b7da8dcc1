"""Messages of other projects in our form."""

from typing import Any

import pytest

from agentfactory.audit.foreign.messages import TEXT, messages_of, named
from agentfactory.base.messages import text_of


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [fields]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", {}), (None, {}), ("north", {TEXT: "north"}), ("[1]", {TEXT: "[1]"}), ([1], {TEXT: [1]})],
)
def test_arguments_that_are_no_object_are_kept(given: Any, expected: dict[str, Any]) -> None:
    (message,) = messages_of([call(name="move", arguments=given)], "assistant")
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "Look:"}, {"type": "image"}, image, {"type": "input_audio", "input_audio": {}}]
    (message,) = messages_of([{"role": "user", "content": parts}], "user")
    assert text_of(message["content"]) == "Look:\n[image]\n[image/png image]\n[input_audio]"


def test_results_without_ids_answer_the_calls_of_their_turn() -> None:
    turn = {"role": "assistant", "tool_calls": [{"name": name, "arguments": {}} for name in ("a", "b", "a")]}
    results = [{"role": "tool", "name": name, "content": name} for name in ("b", "a", "a")]
    messages = named(messages_of([turn, *results, turn, {"role": "tool", "content": "a"}], "assistant"))
    made = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    assert made == [f"call-{n}" for n in range(1, 7)]
    answers = [(each["tool_call_id"], each["name"]) for each in messages if each["role"] == "tool"]
    assert answers == [("call-2", "b"), ("call-1", "a"), ("call-3", "a"), ("call-4", "a")]
