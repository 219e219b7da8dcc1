"""Chat templates: render conversations as text."""

import json
from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from agentfactory.tools.messages import Message, ToolCall

Tools = list[dict[str, Any]] | None
_Calls = tuple[tuple[str, str], ...]
"""Ids and names of tool calls."""
_Key = TypeVar("_Key", bound=Hashable)
_Rendered = TypeVar("_Rendered")
_CACHED_CHARACTERS = 8192
_QUESTION: list[Message] = [{"role": "user", "content": "dummy"}]


class RenderError(ValueError):
    """A chat template cannot render a conversation, or cannot be used for training at all; the message says why."""


class ChatTemplate:
    """A Jinja chat template with the tokenizer's special tokens; renders text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._dummies = lru_cache(1024)(self._render_dummy)
        self._prompts = lru_cache(1024)(self._render_prompt)
        # take JSON, which is hashable and cheaper to create than a render
        self._turns = cached(4096, self._render_turn)
        self._continuations = cached(4096, self._render_continuation)

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

    def beginnings(self, messages: list[Message], tools: Tools, after_end: str) -> dict[tuple[int, bool], str]:
        """Return renders of a conversation up to its assistant's turns and with them, by (number of messages, whether
        the generation prompt follows).

        They are composed of renders of single turns, which conversations share: rendering every beginning takes time
        that grows with the square of their number. Empty if the pieces are not the template's text of the whole
        conversation. `after_end`: see `continuation`.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return {}
        shown = json.dumps(tools)
        try:
            whole = self.render(messages, tools)
            text = self.render(messages[: turns[0]], tools, prompt=True)
            texts = {(len(messages), False): whole, (turns[0], True): text}
            for turn, following in pairwise(turns):
                said = self._turns(json.dumps(messages[turn], default=str), shown)
                new = self._continuations(json.dumps(messages[turn + 1 : following], default=str), (shown, after_end))
                if said is None or new is None:
                    return {}
                texts[turn + 1, False] = text + said
                text = (text + said).removesuffix(after_end) + new
                texts[following, True] = text
        except RenderError:
            return {}
        return texts if whole.startswith(text) else {}

    def _render_turn(self, message: str, tools: str) -> str | None:
        """Return what the template puts after the generation prompt for an assistant's message; None if it does not
        render it there."""
        prompt = self._prompts(tools)
        text = self.render([*_QUESTION, json.loads(message)], json.loads(tools))
        return text[len(prompt) :] if text.startswith(prompt) else None

    def _render_continuation(self, new: str, key: tuple[str, str]) -> str | None:
        tools, after_end = key
        return self.continuation(json.loads(new), json.loads(tools), after_end)

    def _render_prompt(self, tools: str) -> str:
        return self.render(_QUESTION, json.loads(tools), prompt=True)

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


def cached(size: int, render: Callable[[str, _Key], _Rendered]) -> Callable[[str, _Key], _Rendered]:
    """Cache the last `size` renders of short texts: long ones rarely repeat, and the cache would keep gigabytes."""
    kept = lru_cache(size)(render)

    def rendered(text: str, key: _Key) -> _Rendered:
        return (kept if len(text) <= _CACHED_CHARACTERS else render)(text, key)

    return rendered


def _dummy(calls: _Calls) -> list[Message]:
    """Return a conversation that ends with a turn of these calls."""
    turn: Message = {"role": "assistant", "content": "" if calls else "dummy"}
    if calls:
        turn["tool_calls"] = [ToolCall(*call, {}).to_openai() for call in calls]
    return [*_QUESTION, turn]


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
