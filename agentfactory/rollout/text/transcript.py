"""Conversations in a tool-call format: its instructions, and calls, results and answers written as it requires."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from agentfactory.rollout.text.parsers import Call, Parser
from agentfactory.rollout.text.parsers.reasoning_tags import split_reasoning
from agentfactory.rollout.text.templates import RenderError
from agentfactory.tools.messages import Content, Message, ToolCall, ToolResult, ToolSpec


@dataclass(frozen=True)
class Line:
    """A message for the chat template. `index` is that of the message it comes from, `weight` its loss weight."""

    message: Message
    index: int
    weight: float


def transcript(
    messages: Sequence[Message], parser: Parser, specs: Sequence[ToolSpec], system: bool, instructions: str | None
) -> list[Line]:
    """Return the lines of a conversation, with `instructions`. Text that is already in the parser's format is
    unchanged.

    Under a text format, calls are written as text, the results of a turn become one user message, and other assistant
    messages are marked as answers if the format marks answers. The instructions go into the system message, or before
    the first user message if the chat template has no system messages (`system`).

    Raises RenderError, naming the message's index, for calls that the format cannot express.
    """
    lines = as_lines(messages)
    if parser.native:
        return _instruct(lines, instructions, system)
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    written: list[Line] = []
    for role, group in groupby(lines, key=lambda line: line.message["role"]):
        if role == "tool":
            written.append(_tell(list(group), parser, names))
        elif role == "assistant":
            written += [replace(line, message=_write(line, parser, specs)) for line in group]
        else:
            written += group
    return _instruct(written, instructions, system)


def as_lines(messages: Sequence[Message]) -> list[Line]:
    """Convert messages without changes. Their weight is their `weight`, by default 1 for an assistant's and 0 for
    others."""
    weights = [float(m.get("weight", 1.0 if m["role"] == "assistant" else 0.0)) for m in messages]
    return [Line(message, index, weight) for index, (message, weight) in enumerate(zip(messages, weights, strict=True))]


def _tell(lines: list[Line], parser: Parser, names: dict[str, str]) -> Line:
    """Merge the tool messages of one turn into one user message."""
    if len({line.weight for line in lines}) > 1:
        raise RenderError(f"message {lines[0].index}: a turn's results are one message here; give them one weight")
    messages = [line.message for line in lines]
    ids = [str(message.get("tool_call_id", "")) for message in messages]
    calls = [ToolCall(i, m.get("name") or names.get(i, "tool"), {}) for i, m in zip(ids, messages, strict=True)]
    told = parser.answers(calls, [ToolResult(m["content"], info=m.get("info") or {}) for m in messages])
    if len(told) != 1:
        raise RenderError(f"message {lines[0].index}: rollout.parser tells a turn's results in {len(told)} messages")
    return replace(lines[0], message=told[0])


def _write(line: Line, parser: Parser, specs: Sequence[ToolSpec]) -> Message:
    """Return an assistant's message as plain text."""
    message = {key: value for key, value in line.message.items() if key != "tool_calls"}
    _, thought, words = split_reasoning(message.get("content") or "", opened=False)
    calls = [_call(call) for call in line.message.get("tool_calls") or []]
    try:
        if calls:
            text = "\n".join(part for part in (words.strip(), parser.write(calls, specs)) if part)
        else:
            text = parser.write_answer(words) if parser.parse(words, specs).error else words
    except ValueError as error:
        raise RenderError(f"message {line.index}: rollout.parser cannot write its calls: {error}") from error
    found = parser.parse(text, specs)
    if found.error is not None or (found.calls != calls and calls):
        raise RenderError(
            f"message {line.index}: rollout.parser cannot write it: {text!r} is read as {found.error or found.calls}"
        )
    return {**message, "content": thought + text}


def _call(call: dict[str, Any]) -> Call:
    arguments = call["function"]["arguments"]
    # OpenAI's API has arguments as JSON text
    return call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def _instruct(lines: list[Line], instructions: str | None, system: bool) -> list[Line]:
    if instructions is None:
        return lines
    if system and (not lines or lines[0].message["role"] != "system"):
        return [Line({"role": "system", "content": instructions}, 0, 0.0), *lines]
    role = "system" if system else "user"
    at = next((n for n, line in enumerate(lines) if line.message["role"] == role), None)
    if at is None:
        raise RenderError("the chat template has no system messages, and no user message is there for the instructions")
    message = lines[at].message
    content: Content = message["content"]
    if instructions in (content if isinstance(content, str) else [part.get("text") for part in content]):
        return lines
    if isinstance(content, str):
        content = f"{content}\n\n{instructions}" if system else f"{instructions}\n\n{content}"
    else:
        part = {"type": "text", "text": instructions}
        content = [*content, part] if system else [part, *content]
    return [*lines[:at], replace(lines[at], message={**message, "content": content}), *lines[at + 1 :]]
