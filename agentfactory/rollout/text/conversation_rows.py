"""Whole conversations as rows for supervised training, tokenised in exactly the pieces of a chain."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from agentfactory.rollout.text.dialogue import Line
from agentfactory.rollout.text.encoding import MARK, Encoder
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.probing.behaviour import Behaviour
from agentfactory.rollout.text.templates import ChatTemplate, RenderError, Tools, cached, shared_length
from agentfactory.rollout.token_row import Row
from agentfactory.tools.messages import Message, ToolSpec

Spans = list[tuple[int, int, float]]
"""(start, end, weight) of ranges of a text."""


class ConversationRows:
    """A converter of whole conversations to rows. `ends` are the tokens that end a text turn, and a turn with calls."""

    def __init__(
        self,
        template: ChatTemplate,
        behaviour: Behaviour,
        parser: Parser,
        encoder: Encoder,
        ends: Sequence[int | None],
    ) -> None:
        self.template = template
        self.behaviour = behaviour
        self.parser = parser
        self._encoder = encoder
        self._ends = ends
        self._ids = cached(4096, self._encode)

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
        for turn in [i for i, m in enumerate(plain) if m["role"] == "assistant"]:
            prompt, closed = rendered(turn, prompt=True), rendered(turn + 1)
            if not prompt.startswith(text):
                raise RenderError(f"message {lines[start].index}: the chat template rewrites the turns before it")
            closing = self.behaviour.closings.of(plain[turn].get("tool_calls"))
            if not (closed.startswith(prompt) and closed.endswith(closing.text)):
                raise RenderError(
                    f"message {lines[turn].index}: the chat template does not render it after the generation prompt"
                )
            if plain[turn].get("tool_calls") and plain[turn]["content"] and not self.behaviour.words_with_calls:
                raise RenderError(
                    f"message {lines[turn].index}: the chat template has no text beside a tool call: empty its content"
                )
            self._add_context(row, prompt, len(text), _spans(rendered, start, turn, prompt, weights))
            said = closed[len(prompt) : len(closed) - len(closing.text)] + closing.before
            thought = plain[turn].get("reasoning_content") or ""
            if weights[turn] and thought.strip() not in said:
                raise RenderError(
                    f"message {lines[turn].index}: the chat template does not render its reasoning_content: write it "
                    "into the content, in the model's tags"
                )
            if calls := plain[turn].get("tool_calls"):
                self._check_calls(said, calls, lines[turn].index, specs)
            end = self._ends[bool(plain[turn].get("tool_calls"))]
            ids = [*self._ids(said, False), *([] if end is None else [end])]
            _add(row, ids, [weights[turn]] * len(ids))
            text = prompt + said + closing.end
            start = turn + 1
        if start < len(plain):
            whole = rendered(len(plain))
            if not whole.startswith(text):
                raise RenderError(f"message {lines[start].index}: the chat template rewrites the turns before it")
            self._add_context(row, whole, len(text), _spans(rendered, start, len(plain), whole, weights))
        return row

    def _check_calls(self, said: str, calls: list[dict[str, Any]], index: int, specs: list[ToolSpec]) -> None:
        """Raise RenderError for calls that a chain could not parse, for example if a template does not escape quotes in
        a string."""
        words = self.parser.split(said.replace(MARK, ""), self.behaviour.opens_reasoning, self.behaviour.tags)[2]
        found = self.parser.parse(words, specs)
        if [name for name, _ in found.calls] != [call["function"]["name"] for call in calls]:
            reason = found.error or "it has other calls"
            raise RenderError(f"message {index}: rollout.parser does not read what the chat template writes: {reason}")
        for (name, read), call in zip(found.calls, calls, strict=True):
            written = call["function"]["arguments"]
            written = json.loads(written) if isinstance(written, str) else written
            if _as_texts(read) != _as_texts(written):
                raise RenderError(
                    f"message {index}: rollout.parser reads other arguments of {name} than the chat template writes: "
                    f"{json.dumps(read, ensure_ascii=False)[:200]}; arguments must not contain the format's own tags"
                )

    def _add_context(self, row: Row, text: str, begin: int, spans: Spans) -> None:
        """Add text[begin:], tokenised as in `open` and `extend`, with the weights of the spans."""
        if not spans:
            context = self._ids(text[begin:], begin > 0)
            _add(row, context, [0.0] * len(context))
            return
        ids, starts = self._encoder.encode_with_offsets(text[begin:], follows=begin > 0)
        _add(row, ids, [next((w for a, b, w in spans if a <= begin + at < b), 0.0) for at in starts])

    def _encode(self, text: str, follows: bool) -> tuple[int, ...]:
        return tuple(self._encoder.encode(text, follows))


def _as_texts(arguments: dict[str, Any]) -> dict[str, str]:
    """Return arguments as formats without quotes write them, where only the tool's schema distinguishes 3 from "3"."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        for key, value in arguments.items()
    }
    return {key.replace(MARK, ""): text.replace(MARK, "") for key, text in texts.items()}


def _spans(rendered: Callable[[int], str], start: int, end: int, whole: str, weights: list[float]) -> Spans:
    """Return the ranges of messages[start:end] in the text `whole`, with their weights; messages of weight 0 are left
    out."""
    if not any(weights[start:end]):
        return []
    edges = [shared_length(rendered(i), whole) if i else 0 for i in range(start, end + 1)]
    return [(*edge, weight) for edge, weight in zip(pairwise(edges), weights[start:end], strict=True) if weight]


def _add(row: Row, ids: Sequence[int], weights: list[float]) -> None:
    row.token_ids += ids
    row.mask += [int(weight != 0) for weight in weights]
    row.logprobs += [0.0] * len(ids)
    assert row.weights is not None
    row.weights += weights
