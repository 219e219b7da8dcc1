"""Chat templates, which render conversations as text, and their behaviour as found by the probes."""

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from agentfactory.base.messages import Message, ToolCall
from agentfactory.rollout.text.parsers.parser import with_json_arguments

Tools = list[dict[str, Any]] | None
_Calls = tuple[tuple[str, str], ...]
_Key = TypeVar("_Key", bound=Hashable)
_Rendered = TypeVar("_Rendered")
_CACHED_CHARACTERS = 8192
_QUESTION: list[Message] = [{"role": "user", "content": "dummy"}]


class RenderError(ValueError):
    """A chat template that cannot render a conversation, or cannot be used for training; the message says why."""


@dataclass(frozen=True)
class Closing:
    """A template's text after an assistant turn: `before`, the end-of-turn token `end` (empty: plain text closes
    turns), and `after`. `opens_next`: the token is only written before the next message, such as GLM's `<|user|>`."""

    before: str = ""
    end: str = ""
    after: str = ""
    opens_next: bool = False

    @property
    def text(self) -> str:
        """Everything that the template writes after the turn at the end of a conversation."""
        return "" if self.opens_next else self.before + self.end + self.after


@dataclass(frozen=True)
class Closings:
    """The closings of text turns and of turns with calls."""

    words: Closing
    calls: Closing

    def of(self, calls: object) -> Closing:
        return self.calls if calls else self.words


class ChatTemplate:
    """A Jinja chat template with the tokenizer's special tokens. A template that writes the date or the time gets that
    of `clock`. The probes set the form of messages that it expects: the name of the reasoning field, call arguments as
    objects or as JSON text, the content of a turn of calls as empty text or as null, calls in the content, as written
    by `write_calls`, and tools as JSON text in the system message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.clock = datetime.now()
        self.reasoning_field = "reasoning_content"
        self.arguments_as_text = False
        self.null_content = False
        self.tools_in_system = False
        self.write_calls: Callable[[list[dict[str, Any]]], str] | None = None
        # these take JSON, which is hashable and cheaper than a render
        self._dummies = lru_cache(1024)(lambda calls, tools: self.render(_dummy(calls), json.loads(tools)))
        self._prompts = lru_cache(1024)(lambda tools: self.render(_QUESTION, json.loads(tools), prompt=True))
        self._turns = cached(4096, self._render_turn)
        self._continuations: Callable[[str, tuple[str, Closings]], str | None]
        self._continuations = cached(
            4096, lambda new, key: self.continuation(json.loads(new), json.loads(key[0]), key[1])
        )

    def render(self, messages: list[Message], tools: Tools = None, prompt: bool = False) -> str:
        """Render a conversation; `prompt` adds the generation prompt. Raises RenderError."""
        shown = [self._adapted(message) for message in messages]
        if self.tools_in_system and tools:
            # in the field `tools` of the system message, as Phi-4-mini expects
            if shown[0]["role"] != "system":
                shown.insert(0, {"role": "system", "content": ""})
            functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            shown[0] = {**shown[0], "tools": functions}
        try:
            # as an argument, transformers 5.24 makes text of a function
            _compile_jinja_template(self.source).globals["strftime_now"] = self.clock.strftime
            text = self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template is arbitrary code and may raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            raise RenderError(f"the chat template refuses the conversation: {reason}") from error
        assert isinstance(text, str)
        return text

    def _adapted(self, message: Message) -> Message:
        changed = dict(message)
        if "reasoning_content" in message:
            changed[self.reasoning_field] = changed.pop("reasoning_content")
        calls = message.get("tool_calls")
        if calls and self.write_calls is not None:
            del changed["tool_calls"]
            parts = (message.get("content"), self.write_calls(calls))
            changed["content"] = "\n".join(part for part in parts if part)
            return changed
        if calls and self.null_content and message.get("content") == "":
            changed["content"] = None
        if calls and self.arguments_as_text:
            changed["tool_calls"] = [with_json_arguments(call) for call in calls]
        return changed

    def continuation(self, new: list[Message], tools: Tools, closings: Closings, loose: bool = False) -> str | None:
        """Return the text after an assistant turn for `new`, as the difference of two renders with a dummy turn. None
        if that turn changes; `loose` lets `new` replace the end-of-turn token, as harmony does."""
        answers = enumerate(takewhile(lambda message: message["role"] == "tool", new))
        calls = tuple((m.get("tool_call_id", f"call_{number}"), m.get("name", "tool")) for number, m in answers)
        closing = closings.of(calls)
        # cached, because all chains share it at the same turn
        ended = self._dummies(calls, json.dumps(tools)).removesuffix(closing.after)
        text = self.render([*_dummy(calls), *new], tools, prompt=True)
        if text.startswith(ended):
            return text[len(ended) :]
        ended = ended.removesuffix(closing.end)
        if loose and closing.end and not closing.opens_next and text.startswith(ended):
            rest = text[len(ended) :]
            return rest[len(self.leading_token(rest)) :]
        return None

    def leading_token(self, text: str) -> str:
        """Return the added token at the start of `text`; empty if there is none."""
        return max(filter(text.startswith, self._added()), key=len, default="")

    def trailing_token(self, text: str) -> str:
        """Return the added token at the end of `text`, ignoring white space; empty if there is none."""
        return max(filter(text.rstrip().endswith, self._added()), key=len, default="")

    def _added(self) -> Iterable[str]:
        return (token.content for token in self.tokenizer.added_tokens_decoder.values())

    def beginnings(self, messages: list[Message], tools: Tools, closings: Closings) -> dict[tuple[int, bool], str]:
        """Return the renders up to and including each assistant turn, by (messages, whether a prompt follows), composed
        of cached renders, since rendering all takes quadratic time. Empty if the whole differs."""
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
                new = self._continuations(json.dumps(messages[turn + 1 : following], default=str), (shown, closings))
                if said is None or new is None:
                    return {}
                texts[turn + 1, False] = text + said
                text = (text + said).removesuffix(closings.of(messages[turn].get("tool_calls")).after) + new
                texts[following, True] = text
        except RenderError:
            return {}
        return texts if whole.startswith(text) else {}

    def _render_turn(self, message: str, tools: str) -> str | None:
        """Return the text after the generation prompt for an assistant message; None if it is not rendered there."""
        prompt = self._prompts(tools)
        text = self.render([*_QUESTION, json.loads(message)], json.loads(tools))
        return text[len(prompt) :] if text.startswith(prompt) else None

    def closing_of(self, text: str) -> Closing:
        """Split the text of a turn's closing. The end-of-turn token is the first added token."""
        found = [token for token in self._added() if token in text]
        token = min(found, key=lambda token: (text.find(token), -len(token)), default="")
        before, _, after = text.partition(token) if token else ("", "", text)
        return Closing(before, token, after)


def cached(size: int, render: Callable[[str, _Key], _Rendered]) -> Callable[[str, _Key], _Rendered]:
    """Cache the last `size` renders of short texts. Long texts rarely repeat, and would fill gigabytes."""
    kept = lru_cache(size)(render)

    def rendered(text: str, key: _Key) -> _Rendered:
        return (kept if len(text) <= _CACHED_CHARACTERS else render)(text, key)

    return rendered


def _dummy(calls: _Calls) -> list[Message]:
    if not calls:
        return [*_QUESTION, {"role": "assistant", "content": "dummy"}]
    made = [ToolCall(*call, {}).to_openai() for call in calls]
    return [*_QUESTION, {"role": "assistant", "content": "", "tool_calls": made}]


def shared_length(a: str, b: str) -> int:
    """Return the number of leading characters that two texts share."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


@dataclass
class Behaviour:
    """A template's behaviour, as found by the probes: whether it renders system messages (`system`), several calls in a
    turn, words next to calls, questions directly after results, and images in user messages and in tool messages.
    `rewrites` describes how the template rewrites history (None: it appends); `notes` are harmless findings. `tags`
    open and close reasoning in a turn. `conversations` are the probe conversations that it rendered."""

    closings: Closings
    generation_prompt: str
    reasoning: bool
    """True if it renders reasoning from a separate message field; otherwise reasoning stays in the content."""
    tags: tuple[str, str]
    system: bool
    frame: str
    """A rendered question, answer and question, with the tokens that frame turns."""
    whole_frame: str = ""
    """Text with all tokens that frame turns, including system and tool messages."""
    turns: str = ""
    """Rendered assistant turns, with the tokens that the assistant may write."""
    shows_tools: bool = True
    """True if it describes the tools; otherwise the system message must."""
    complains_as_tool: bool = True
    """True if it renders a tool message without a call; otherwise a user message reports a malformed call."""
    questions_after_results: bool = True
    parallel_calls: bool = True
    words_with_calls: bool = True
    images: bool = False
    images_of_tools: bool = True
    """True if it renders images in tool messages, or never gets any."""
    misprint: str | None = None
    """The beginning of a call as the instructions show it, if the template's own calls begin differently."""
    rewrites: str | None = None
    notes: list[str] = field(default_factory=list)
    conversations: list[list[Message]] = field(default_factory=list)

    @property
    def end(self) -> str:
        """The token that ends a text turn; empty if the template closes turns with plain text."""
        return self.closings.words.end

    @property
    def opens_reasoning(self) -> bool:
        """True if the generation prompt opens the reasoning, so the sampled text contains only its end."""
        return self.generation_prompt.rstrip().endswith(self.tags[0].rstrip())
