"""Chat templates: render conversations as text."""

import json
from functools import lru_cache
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentfactory.tools.messages import Message, ToolCall

Tools = list[dict[str, Any]] | None
_Calls = tuple[tuple[str, str], ...]
"""Ids and names of tool calls."""


class RenderError(ValueError):
    """A chat template cannot render a conversation, or cannot be used for training at all; the message says why."""


class ChatTemplate:
    """A Jinja chat template with the tokenizer's special tokens; renders text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._dummies = lru_cache(1024)(self._render_dummy)

    def render(self, messages: list[Message], tools: Tools = None, prompt: bool = False) -> str:
        """Return the conversation's text; `prompt` adds the generation prompt. Raises RenderError."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template is arbitrary code: it may raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            raise RenderError(f"the chat template refuses the conversation: {reason}") from error
        assert isinstance(text, str)
        return text

    def continuation(self, new: list[Message], tools: Tools, after_end: str, prompt: bool = True) -> str | None:
        """Return what the template puts after an assistant turn's end for the messages `new`: a difference of two
        renders.

        `after_end` is what it puts there when nothing follows. The preceding turn is a dummy, which makes the calls
        that tool messages answer. None if the template changes that turn because of `new`.
        """
        answered = takewhile(lambda message: message["role"] == "tool", new)
        calls = tuple(
            (message.get("tool_call_id", f"call_{number}"), message.get("name", "tool"))
            for number, message in enumerate(answered)
        )
        # the same for all chains at the same turn
        ended = self._dummies(calls, json.dumps(tools)).removesuffix(after_end)
        text = self.render([*_dummy(calls), *new], tools, prompt)
        return text[len(ended) :] if text.startswith(ended) else None

    def _render_dummy(self, calls: _Calls, tools: str) -> str:
        return self.render(_dummy(calls), json.loads(tools))

    def split_closing(self, closing: str) -> tuple[str, str, str]:
        """Split a turn's closing into (text before its end, end-of-turn token, text after it).

        The end-of-turn token is the closing's first added token. A template that closes a turn with plain text has
        none: ("", "", closing).
        """
        contents = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        found = sorted((closing.find(text), -len(text), text) for text in contents if text in closing)
        if not found:
            return "", "", closing
        at, _, token = found[0]
        return closing[:at], token, closing[at + len(token) :]


def _dummy(calls: _Calls) -> list[Message]:
    """Return a conversation that ends with a turn of these calls."""
    turn: Message = {"role": "assistant", "content": "" if calls else "dummy"}
    if calls:
        turn["tool_calls"] = [ToolCall(*call, {}).to_openai() for call in calls]
    return [{"role": "user", "content": "dummy"}, turn]


def shared_length(a: str, b: str) -> int:
    """Return the number of leading characters that two texts share."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


def split_reasoning(text: str, opened: bool) -> tuple[str, str, str]:
    """Split text into the reasoning, the text that wrote it (tags included), and the text after it. Reasoning that was
    cut has no rest.

    `opened`: the text begins inside the reasoning.
    """
    inside = text.lstrip()
    if inside.startswith("<think>"):
        inside = inside.removeprefix("<think>")
    elif not opened:
        return "", "", text
    reasoning, _, rest = inside.partition("</think>")
    rest = rest.lstrip()
    return reasoning.strip(), text[: len(text) - len(rest)], rest
