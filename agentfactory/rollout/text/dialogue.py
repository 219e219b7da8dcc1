"""The dialogue part of a renderer: messages in a tool-call format, with instructions, results and format errors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from agentfactory.base.messages import Content, Message, ToolCall, ToolResult, ToolSpec
from agentfactory.rollout.images.parts import show_in_user_turns, text_part
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.parsers.parser import call_of, split_reasoning
from agentfactory.rollout.text.templates import RenderError


@dataclass(frozen=True)
class Line:
    """A message for the chat template. `index` is the index of its source message, `weight` its loss weight."""

    message: Message
    index: int
    weight: float


@dataclass(frozen=True)
class Dialogue:
    """A writer of messages in the format of `parser`. The flags state the support of the chat template or endpoint for
    system messages, a description of the tools, images in tool messages, and format errors as tool messages."""

    parser: Parser
    system: bool = True
    describes_tools: bool = True
    images_of_tools: bool = True
    complains_as_tool: bool = False

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """Return the description of the tools; None if the template has it. Raises ValueError if none can be called."""
        native = self.parser.native and not self.describes_tools
        return Parser.instructions(self.parser, specs) if native else self.parser.instructions(specs)

    def instruct(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Message]:
        """Convert opening messages to the tool-call format, with its instructions; see `lines`. Idempotent."""
        return [line.message for line in self.lines(messages, specs)]

    def lines(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Line]:
        """Return the lines of a conversation, with instructions in the system message, or else before the first user
        message. Under a text format, calls are written as text, the results of a turn become one user message, and
        other turns are marked as answers. Raises RenderError, with the message's index."""
        parser, instructions = self.parser, self.instructions(specs)
        messages = self._shown(messages)
        lines = as_lines(messages)
        if parser.native:
            return _instruct(lines, instructions, self.system)
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        written: list[Line] = []
        for role, group in groupby(lines, key=lambda line: line.message["role"]):
            if role == "tool":
                written.append(_merge_results(list(group), parser, names))
            elif role == "assistant":
                written += [replace(line, message=_write(line, parser, specs)) for line in group]
            else:
                written += group
        return _instruct(written, instructions, self.system)

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        return self._shown(self.parser.answers(calls, results))

    def complaint(self, text: str) -> list[Message]:
        told = self.parser.complaint(text)
        if self.complains_as_tool:
            return told
        return [{**message, "role": "user"} if message["role"] == "tool" else message for message in told]

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages) if self.images_of_tools else show_in_user_turns(messages)


def as_lines(messages: Sequence[Message]) -> list[Line]:
    """Convert messages without changes. The default weight is 1 for assistant messages and 0 for others."""
    return [Line(m, index, float(m.get("weight", m["role"] == "assistant"))) for index, m in enumerate(messages)]


def _merge_results(lines: list[Line], parser: Parser, names: dict[str, str]) -> Line:
    if len({line.weight for line in lines}) > 1:
        raise RenderError(f"message {lines[0].index}: a turn's results become one message; give them equal weights")
    messages = [line.message for line in lines]
    ids = [str(message.get("tool_call_id", "")) for message in messages]
    calls = [ToolCall(i, m.get("name") or names.get(i, "tool"), {}) for i, m in zip(ids, messages, strict=True)]
    told = parser.answers(calls, [ToolResult(m["content"], info=m.get("info") or {}) for m in messages])
    if len(told) != 1:
        raise RenderError(f"message {lines[0].index}: rollout.parser writes a turn's results as {len(told)} messages")
    return replace(lines[0], message=told[0])


def _write(line: Line, parser: Parser, specs: Sequence[ToolSpec]) -> Message:
    message = {key: value for key, value in line.message.items() if key != "tool_calls"}
    _, thought, words = split_reasoning(message.get("content") or "", opened=False)
    calls = [call_of(call) for call in line.message.get("tool_calls") or []]
    try:
        if calls:
            text = "\n".join(part for part in (words.strip(), parser.write(calls, specs)) if part)
        else:
            text = parser.write_answer(words) if parser.parse(words, specs).error else words
    except ValueError as error:
        raise RenderError(f"message {line.index}: rollout.parser cannot write its calls: {error}") from error
    found = parser.parse(text, specs)
    if found.error is not None or (found.calls != calls and calls):
        problem = f"{text!r} is read as {found.error or found.calls}"
        raise RenderError(f"message {line.index}: rollout.parser cannot write it: {problem}")
    return {**message, "content": thought + text}


def _instruct(lines: list[Line], instructions: str | None, system: bool) -> list[Line]:
    if instructions is None:
        return lines
    if system and (not lines or lines[0].message["role"] != "system"):
        return [Line({"role": "system", "content": instructions}, 0, 0.0), *lines]
    role = "system" if system else "user"
    at = next((n for n, line in enumerate(lines) if line.message["role"] == role), None)
    if at is None:
        raise RenderError("the chat template has no system messages, and there is no user message for the instructions")
    message = lines[at].message
    content: Content = message["content"]
    if isinstance(content, str):
        known = instructions in content
        content = f"{content}\n\n{instructions}" if system else f"{instructions}\n\n{content}"
    else:
        part = text_part(instructions)
        known = part in content
        content = [*content, part] if system else [part, *content]
    if known:
        return lines
    return [*lines[:at], replace(lines[at], message={**message, "content": content}), *lines[at + 1 :]]
