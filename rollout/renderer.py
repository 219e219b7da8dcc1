"""Rendering: messages to token ids and back, so that what was sampled is never tokenised again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from rollout.config import ModelConfig
from rollout.hermes import parse_calls
from rollout.templates import (
    PROBE_TOOLS,
    Behaviour,
    ChatTemplate,
    RenderError,
    Use,
    choose_template,
    shared_length,
)
from rollout.trajectory import Row
from tools.messages import Message, ToolCall, ToolSpec

Log = Callable[[dict[str, Any]], None]
Spans = list[tuple[int, int, float]]
"""(start, end, weight) of stretches of a text."""


@dataclass(frozen=True)
class Parsed:
    """What a sampled turn says. `error` is the reason of a malformed call, in words for the model; then no call of
    the turn is executed and `message` holds the text as it was written."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None


class Renderer(Protocol):
    """Turns conversations into token ids, and sampled ids into messages.

    Whoever drives a chain keeps the pieces: `open`, then sampled ids and `extend` in turn. Their concatenation is what
    the server is sent.
    """

    stop_token_ids: list[int]
    info: dict[str, Any]

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Ids of a conversation, ending with the generation prompt."""

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """Ids to append to `ids`, which end with a sampled turn, for the messages `new` and the next turn.

        `messages` is the whole conversation, `new` included. None: the template rewrites history here, begin a new row
        with `open(messages, specs)`.
        """

    def parse(self, sampled_ids: list[int], first_call: int = 0) -> Parsed:
        """A sampled turn as a message; its calls are numbered from `first_call` (the chain's calls so far)."""

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """A whole conversation as one row for supervised training."""


class TemplateRenderer:
    """Any chat template, by template difference.

    Sampled ids are kept as they are. What follows them is the difference of two renders of a short dummy conversation,
    tokenised apart. `info["choice"]` says how the template is used:

    - `append`: the template leaves earlier turns alone; `extend` gives ids.
    - `training variant`: the same, with the variant that TRL ships of a template that does not.
    - `fork`: the template rewrites history. `extend` gives ids only where the re-rendered conversation begins, letter
      for letter, with the text of `ids` and the closing of the turn; otherwise None.

    A turn that was cut before its end-of-turn token gets the closing that the template puts there, as context.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        behaviour: Behaviour,
        info: dict[str, Any],
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.behaviour = behaviour
        # without one in the template, turns end with the tokenizer's own, which the template does not write
        end: Any = tokenizer.convert_tokens_to_ids(behaviour.end) if behaviour.end else tokenizer.eos_token_id
        self._end: int | None = end
        # what a turn lacks that was cut before its end
        self._missing = [*self._encode(behaviour.before_end), end] if behaviour.end else []
        ends: tuple[Any, ...] = (end, tokenizer.eos_token_id, *eos_token_ids)
        self.stop_token_ids: list[int] = sorted({i for i in ends if i is not None})
        self.info = {**info, "stop_token_ids": self.stop_token_ids}
        self._specs: list[ToolSpec] = []
        self._tools = "[]"
        # the cached functions get JSON, which is hashable and cheaper to make than a render
        self._opening = lru_cache(1024)(self._render_opening)
        self._following = lru_cache(16384)(self._render_following)

    @property
    def chat_template(self) -> str:
        """The Jinja source in use: an export ships it."""
        return self.template.source

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Ids of a conversation, ending with the generation prompt. Raises RenderError (a ValueError)."""
        return list(self._opening(json.dumps(messages), self._json(specs)))

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """See Renderer. Appending templates never give None on what the probes cover."""
        tools = self._json(specs)
        missing = [] if ids[-1:] == [self._end] else self._missing
        following: Sequence[int] | None
        if self.behaviour.rewrites:
            text = self._decode([*ids, *missing])
            whole = self.template.render(messages, json.loads(tools), prompt=True)
            following = self._continue(whole[len(text) :]) if whole.startswith(text) else None
        else:
            following = self._following(json.dumps(new), tools)
        return None if following is None else [*missing, *following]

    def parse(self, sampled_ids: list[int], first_call: int = 0) -> Parsed:
        """See Renderer. Ids are `call_{n}`. Reasoning goes to `reasoning_content` where the template knows it."""
        ends = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        text = self._decode(sampled_ids[:-1] if ends else sampled_ids)
        reasoning, thought, rest = _split_reasoning(text, self.behaviour.opens_reasoning)
        found = parse_calls(rest)
        message: Message = {"role": "assistant", "content": found.content}
        if not self.behaviour.reasoning:
            message["content"] = thought + found.content
        elif reasoning:
            message["reasoning_content"] = reasoning
        if found.error:
            return Parsed(message, error=found.error)
        calls = [ToolCall(f"call_{first_call + n}", *call) for n, call in enumerate(found.calls)]
        if calls:
            message["tool_calls"] = [call.to_openai() for call in calls]
        return Parsed(message, calls)

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """A whole conversation as one row, in the very pieces of a chain whose turns are the messages' own text.

        `weight` of a message (OpenAI's fine-tuning convention) is the weight of its tokens: by default 1 for an
        assistant message with its end-of-turn token, 0 for any other. The mask is 1 where the weight is not 0. The
        generation prompt and the rest of a turn's closing have weight 0. The row ends with the last turn's end-of-turn
        token, or with the messages after it. Raises RenderError, naming the message's index, where the template
        cannot render the conversation or rewrites it.
        """
        tools = json.loads(self._json(specs))
        self._check_system(messages)
        weights = [float(m.get("weight", 1.0 if m["role"] == "assistant" else 0.0)) for m in messages]
        plain = [{k: v for k, v in m.items() if k != "weight"} for m in messages]

        @cache
        def rendered(end: int, prompt: bool = False) -> str:
            try:
                return self.template.render(plain[:end], tools, prompt)
            except RenderError as error:
                raise RenderError(f"message {end - 1}: {error}") from error

        row = Row(weights=[])
        text = ""  # of the row so far, as a chain was sent it
        start = 0  # of the messages since the last turn
        for turn in [i for i, m in enumerate(plain) if m["role"] == "assistant"]:
            prompt, closed = rendered(turn, prompt=True), rendered(turn + 1)
            if not prompt.startswith(text):
                raise RenderError(f"message {start}: the chat template rewrites the turns before it")
            if not (closed.startswith(prompt) and closed.endswith(self.behaviour.closing)):
                raise RenderError(f"message {turn}: the chat template does not render it after a generation prompt")
            self._add_context(row, prompt, len(text), _spans(rendered, start, turn, prompt, weights))
            said = closed[len(prompt) : len(closed) - len(self.behaviour.closing)] + self.behaviour.before_end
            ids = self._encode(said) + ([] if self._end is None else [self._end])
            _add(row, ids, [weights[turn]] * len(ids))
            text = prompt + said + self.behaviour.end
            start = turn + 1
        if start < len(plain):
            whole = rendered(len(plain))
            if not whole.startswith(text):
                raise RenderError(f"message {start}: the chat template rewrites the turns before it")
            self._add_context(row, whole, len(text), _spans(rendered, start, len(plain), whole, weights))
        return row

    def tokens_agree(self, specs: list[ToolSpec]) -> bool:
        """Whether the pieces of the probe conversations are the tokens of their whole text."""
        for conversation in self.behaviour.conversations:
            ids = self.conversation_row(conversation, specs).token_ids
            if not self.behaviour.end:  # the template does not write the token that ends a turn
                ids = [i for i in ids if i != self._end]
            whole = self._encode(self.template.render(conversation, json.loads(self._json(specs))))
            if ids != whole[: len(ids)]:
                return False
        return True

    def _add_context(self, row: Row, text: str, begin: int, spans: Spans) -> None:
        """Add text[begin:], tokenised as `open` and `extend` do, with the weights of the spans."""
        if not spans:
            ids = self._continue(text[begin:]) if begin else self._encode(text)
            _add(row, ids, [0.0] * len(ids))
            return
        anchor = self.behaviour.end if begin else ""
        encoding = self.tokenizer(anchor + text[begin:], add_special_tokens=False, return_offsets_mapping=True)
        skip = 1 if anchor else 0
        starts = [begin + at - len(anchor) for at, _ in encoding["offset_mapping"][skip:]]
        by_token = [next((w for a, b, w in spans if a <= at < b), 0.0) for at in starts]
        _add(row, encoding["input_ids"][skip:], by_token)

    def _json(self, specs: list[ToolSpec]) -> str:
        """The tools as JSON, made anew only when they change."""
        if specs != self._specs:
            self._specs, self._tools = list(specs), json.dumps([spec.to_openai() for spec in specs])
        return self._tools

    def _render_opening(self, messages: str, tools: str) -> tuple[int, ...]:
        conversation = json.loads(messages)
        self._check_system(conversation)
        return tuple(self._encode(self.template.render(conversation, json.loads(tools), prompt=True)))

    def _render_following(self, new: str, tools: str) -> tuple[int, ...] | None:
        text = self.template.continuation(json.loads(new), json.loads(tools), self.behaviour.after_end)
        return None if text is None else tuple(self._continue(text))

    def _continue(self, text: str) -> list[int]:
        """Ids of a text that follows an end-of-turn token. It is tokenised behind that token, since some tokenizers
        treat the beginning of a text in a way of its own."""
        ids = self._encode(self.behaviour.end + text)
        return ids[1:] if self.behaviour.end else ids

    def _check_system(self, messages: list[Message]) -> None:
        if not self.behaviour.system and any(message["role"] == "system" for message in messages):
            raise RenderError(
                "the chat template has no system messages: leave out rollout.system_prompt, or put its text into the "
                "first user message"
            )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _spans(rendered: Callable[[int], str], start: int, end: int, whole: str, weights: list[float]) -> Spans:
    """Where messages[start:end] stand in the text `whole`, with their weights; those of weight 0 are left out."""
    if not any(weights[start:end]):
        return []
    edges = [shared_length(rendered(i), whole) if i else 0 for i in range(start, end + 1)]
    return [(*edge, weight) for edge, weight in zip(pairwise(edges), weights[start:end], strict=True) if weight]


def _add(row: Row, ids: list[int], weights: list[float]) -> None:
    row.token_ids += ids
    row.mask += [int(weight != 0) for weight in weights]
    row.logprobs += [0.0] * len(ids)
    assert row.weights is not None
    row.weights += weights


def _split_reasoning(text: str, opened: bool) -> tuple[str, str, str]:
    """Reasoning, the text that wrote it (tags included), and the text after it. Reasoning that was cut has no rest."""
    inside = text.lstrip()
    if inside.startswith("<think>"):
        inside = inside.removeprefix("<think>")
    elif not opened:
        return "", "", text
    reasoning, _, rest = inside.partition("</think>")
    rest = rest.lstrip()
    return reasoning.strip(), text[: len(text) - len(rest)], rest


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    *,
    parser: str = "hermes",
    tools: bool = True,
    eos_token_ids: Sequence[int] = (),
    log: Log | None = None,
) -> TemplateRenderer:
    """A renderer for a tokenizer and a Jinja template (default: the tokenizer's own), after probing the template.

    `tools`: the chains call tools; without them the template need not render any. `eos_token_ids` end a turn beside
    the template's and the tokenizer's own. `log` gets one record, `{"renderer": info}`. Raises RenderError (a
    ValueError) where the template cannot serve.
    """
    if parser != "hermes":
        raise ValueError(f"rollout.parser: {parser!r} is unknown; use 'hermes'")
    origin = "tokenizer" if chat_template is None else "model.chat_template"
    if chat_template is None and tokenizer.chat_template is None:
        raise RenderError("the tokenizer has no chat template: set model.chat_template to a file with one")
    source = tokenizer.get_chat_template(chat_template, tools=[] if tools else None)
    choice = choose_template(tokenizer, source, tools, _read_calls)
    info: dict[str, Any] = {
        "choice": str(choice.use),
        "reasons": [*choice.reasons, *choice.behaviour.notes],
        "template": origin if choice.variant is None else f"trl:{choice.variant}",
        "template_sha256": hashlib.sha256(choice.template.source.encode()).hexdigest(),
        "parser": parser,
    }
    renderer = TemplateRenderer(tokenizer, choice.template, choice.behaviour, info, eos_token_ids)
    info = renderer.info
    if not choice.behaviour.end:
        info["reasons"].append("closes turns with plain text: a turn ends with the tokenizer's end-of-sequence token")
    if choice.use != Use.FORK and not renderer.tokens_agree(PROBE_TOOLS if tools else []):
        info["reasons"].append("tokens merge across the turn boundary: the boundary is tokenised apart")
    if log:
        log({"renderer": info})
    return renderer


def _read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text).calls


def load_renderer(model: ModelConfig, parser: str, log: Log | None = None, *, tools: bool = True) -> TemplateRenderer:
    """The renderer of a recipe's model. Raises ValueError where a file is missing or the template cannot serve."""
    source = None
    if model.chat_template is not None:
        file = Path(model.chat_template)
        if not file.is_file():
            raise ValueError(f"model.chat_template: there is no file {file}; name a Jinja file")
        source = file.read_text(encoding="utf-8")
    return make_renderer(
        load_tokenizer(model.path),
        source,
        parser=parser,
        tools=tools,
        eos_token_ids=_generation_eos(model.path),
        log=log,
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises ValueError where there is none.

    transformers' AutoTokenizer takes seconds to import and loads torch. It is only used for models whose files ask for
    a class of their own; others are the tokenizer file as it is.
    """
    try:
        config = cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        name = json.loads(Path(config).read_text(encoding="utf-8")).get("tokenizer_class") if config else None
        if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {path} has no tokenizer that transformers can load: {error}") from error


def _generation_eos(path: str) -> list[int]:
    """The end-of-sequence ids of the model's generation_config.json, where it has one."""
    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    ids = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id") if file else None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
