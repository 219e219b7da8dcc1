"""Whole conversations as rows for supervised training, tokenised in exactly the pieces of a chain."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.text.dialogue import Line
from agentfactory.rollout.text.encoding import MARK, Encoder, map_strings
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.parsers.parser import call_of
from agentfactory.rollout.text.templates import Behaviour, ChatTemplate, RenderError, Tools, cached, shared_length
from agentfactory.rollout.token_row import Row


@dataclass
class ConversationRows:
    """A converter of whole conversations to rows. `ends` are the tokens that end a text turn, and a turn with calls."""

    template: ChatTemplate
    behaviour: Behaviour
    parser: Parser
    encoder: Encoder
    ends: Sequence[int | None]

    def __post_init__(self) -> None:
        self._ids = cached(4096, self.encoder.encode)

    def row(self, lines: list[Line], plain: list[Message], tools: Tools, specs: list[ToolSpec]) -> Row:
        """Return the row of a conversation. `plain` are the messages of `lines`, and `tools` the tools of `specs`, in
        the chat template's form. Raises RenderError, naming the message's index."""
        weights = [line.weight for line in lines]
        texts = {} if self.behaviour.rewrites else self.template.beginnings(plain, tools, self.behaviour.closings)

        def rendered(end: int, prompt: bool = False) -> str:
            if (end, prompt) not in texts:
                try:
                    texts[end, prompt] = self.template.render(plain[:end], tools, prompt)
                except RenderError as error:
                    raise RenderError(f"message {lines[end - 1].index}: {error}") from error
            return texts[end, prompt]

        row = Row(weights=[])
        text = ""  # the row's text so far, as a chain would send it to the server
        start = 0  # index of the first message since the last turn
        if plain[0]["role"] == "assistant":
            reason = "a model is never asked without a prompt: put a system or user message before its first turn"
            raise RenderError(f"message {lines[0].index}: {reason}")

        def add_context(end: int, whole: str) -> None:
            if not whole.startswith(text):
                raise RenderError(f"message {lines[start].index}: the chat template rewrites the turns before it")
            # tokenised as in `open` and `extend`
            begin, given = len(text), weights[start:end]
            if not any(given):
                context = self._ids(whole[begin:], begin > 0)
                _add(row, context, [0.0] * len(context))
                return
            edges = [shared_length(rendered(i), whole) if i else 0 for i in range(start, end + 1)]
            spans = [(*edge, weight) for edge, weight in zip(pairwise(edges), given, strict=True) if weight]
            ids, starts = self.encoder.encode_with_offsets(whole[begin:], follows=begin > 0)
            _add(row, ids, [next((w for a, b, w in spans if a <= begin + at < b), 0.0) for at in starts])

        for turn in [i for i, m in enumerate(plain) if m["role"] == "assistant"]:
            prompt, closed = rendered(turn, prompt=True), rendered(turn + 1)
            add_context(turn, prompt)
            message, calls = plain[turn], plain[turn].get("tool_calls")
            closing = self.behaviour.closings.of(calls)
            said = closed[len(prompt) : len(closed) - len(closing.text)] + closing.before
            problem = None
            if not (closed.startswith(prompt) and closed.endswith(closing.text)):
                problem = "the chat template does not render it after the generation prompt"
            elif calls and message["content"] and not self.behaviour.words_with_calls:
                problem = "the chat template has no text beside a tool call: empty its content"
            elif weights[turn] and (message.get("reasoning_content") or "").strip() not in said:
                fix = "write it into the content, in the model's tags"
                problem = f"the chat template does not render its reasoning_content: {fix}"
            elif calls:
                problem = self._fault(said, calls, specs)
            if problem is not None:
                raise RenderError(f"message {lines[turn].index}: {problem}")
            end = self.ends[bool(calls)]
            ids = [*self._ids(said, False), *([] if end is None else [end])]
            _add(row, ids, [weights[turn]] * len(ids))
            text = prompt + said + closing.end
            start = turn + 1
        if start < len(plain):
            add_context(len(plain), rendered(len(plain)))
        return row

    def _fault(self, said: str, calls: list[dict[str, Any]], specs: list[ToolSpec]) -> str | None:
        """Return why a chain could not parse these calls, such as quotes that a template does not escape."""
        words = self.parser.split(said.replace(MARK, ""), self.behaviour.opens_reasoning, self.behaviour.tags)[2]
        found = self.parser.parse(words, specs)
        if [name for name, _ in found.calls] != [call["function"]["name"] for call in calls]:
            return f"rollout.parser does not read what the chat template writes: {found.error or 'it has other calls'}"
        for (name, read), call in zip(found.calls, calls, strict=True):
            if problem := _difference(read, call_of(call)[1]):
                return f"in the call of {name}, {problem}"
        return None


def _difference(read: dict[str, Any], written: dict[str, Any]) -> str | None:
    """Describe the first argument that the parser reads otherwise than written, with the fix; None if there is none."""
    read, written = (map_strings(given, lambda text: text.replace(MARK, "")) for given in (read, written))
    name = next((name for name in [*written, *read] if _as_text(read, name) != _as_text(written, name)), None)
    if name is None:
        return None
    fix = "arguments must not contain the format's own tags"
    if name in read and name in written and type(read[name]) is not type(written[name]):
        fix = f"give {name} a type in the tool's schema that fits the value"
    shown, found = _shown(written, name), _shown(read, name)
    return f"{name} is {shown}, but rollout.parser reads {found} in the rendered turn; {fix}"


def _as_text(arguments: dict[str, Any], name: str) -> str | None:
    """Return an argument as formats without quotes write it: only the tool's schema distinguishes 3 from "3"."""
    if name not in arguments or isinstance(arguments[name], str):
        return arguments.get(name)
    return json.dumps(arguments[name], sort_keys=True, ensure_ascii=False)


def _shown(arguments: dict[str, Any], name: str) -> str:
    text = json.dumps(arguments[name], ensure_ascii=False) if name in arguments else "missing"
    return text if len(text) <= 100 else text[:100] + "..."


def _add(row: Row, ids: Sequence[int], weights: list[float]) -> None:
    row.token_ids += ids
    row.mask += [int(weight != 0) for weight in weights]
    row.logprobs += [0.0] * len(ids)
    assert row.weights is not None
    row.weights += weights
