"""Renders messages to token ids and parses ids back, so that sampled ids are never tokenised again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.encoding import MARK, Encoder, map_strings, skip_marked
from agentfactory.rollout.images.parts import for_template, image_urls, show_in_user_turns
from agentfactory.rollout.parsers import AUTO, Parser, Reading, load_parser
from agentfactory.rollout.probing import PROBE_TOOLS, Behaviour
from agentfactory.rollout.reasoning_tags import split_reasoning
from agentfactory.rollout.roles import TokenLengths, turn_roles
from agentfactory.rollout.template_choice import Reasoning, Use, choose_template, recognise
from agentfactory.rollout.templates import ChatTemplate, RenderError, cached, shared_length
from agentfactory.rollout.trajectory import Row
from agentfactory.rollout.transcript import Line, as_lines, transcript
from agentfactory.tools.errors import SettingError
from agentfactory.tools.messages import Message, ToolCall, ToolResult, ToolSpec, text_of

if TYPE_CHECKING:  # chains of text need no image library
    from agentfactory.rollout.images.sight import Sight

Log = Callable[[dict[str, Any]], None]
Spans = list[tuple[int, int, float]]
"""(start, end, weight) of ranges of a text."""


@dataclass(frozen=True)
class Parsed:
    """The content of a sampled turn. `error`, written for the model, is what is wrong with it; if set, no call of the
    turn is executed and `message` contains the text as written. `answer` is the final answer if the format marks one.
    `roles` has a letter for each sampled token (roles.turn_roles); empty: unknown."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None
    answer: str | None = None
    roles: str = ""


class Renderer(Protocol):
    """Turns conversations into token ids, and sampled ids into messages.

    The caller keeps the pieces: `open`, then sampled ids and `extend` in turn. The server gets their concatenation.

    `sight` is how the model sees images; None: they become text. Ids have one token for each image: the caller expands
    them.
    """

    stop_token_ids: list[int]
    info: dict[str, Any]
    sight: "Sight | None"

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, ending with the generation prompt."""

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """Return the ids to append to `ids`, which end with a sampled turn, for the messages `new` and the next turn.

        `messages` is the whole conversation, `new` included. None means that the template rewrites history here; begin
        a new row with `open(messages, specs)`.
        """

    def parse(
        self, sampled_ids: list[int], first_call: int = 0, prefix: str = "", specs: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """Parse a sampled turn into a message; its calls are numbered from `first_call` (the chain's calls so far).
        `prefix` is the text that the turn was made to begin with, and is part of the message. Text formats take the
        types of arguments from `specs`."""

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """Return the description of the tools for the model; None if the chat template contains it."""

    def instruct(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Message]:
        """Convert the messages that open a chain to the tool-call format, with its instructions. Applying this twice
        changes nothing more."""

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """Return the messages with the results of a turn."""

    def complaint(self, text: str) -> list[Message]:
        """Return the messages that tell the model what is wrong with a malformed turn."""

    def encode(self, prefix: str) -> list[int]:
        """Return the ids of the text that each turn is made to begin with (`rollout.assistant_prefix`)."""

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text`, leaving at most `max_tokens` tokens and a marker; None if it fits."""

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Return a whole conversation as one row for supervised training; its images are expanded."""


class TemplateRenderer:
    """Renders any chat template by template difference.

    Sampled ids are kept unchanged. What follows them is the difference of two renders of a short dummy conversation,
    tokenised separately. `info["choice"]` says how the template is used:

    - `append`: the template leaves earlier turns unchanged; `extend` returns ids.
    - `training variant`: the same, with TRL's variant of a template that rewrites earlier turns.
    - `keep`: the template rewrites earlier turns, and `extend` returns ids all the same.
    - `fork`: the template rewrites history. `extend` returns ids only if the re-rendered conversation begins, letter
      for letter, with the text of `ids` and the closing of the turn; otherwise None.
    - `drop`: the same, and the reasoning of earlier turns is taken out of the conversation before it is rendered.

    A turn that was cut before its end-of-turn token gets the template's closing, as context.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        behaviour: Behaviour,
        parser: Parser,
        info: dict[str, Any],
        eos_token_ids: Sequence[int] = (),
        sight: "Sight | None" = None,
        use: Use = Use.APPEND,
    ) -> None:
        self.tokenizer = tokenizer
        self.use = use
        self.template = template
        self.behaviour = behaviour
        self.parser = parser
        self.sight = sight
        # a token that only the template writes, in the text of an assistant too
        self._banned = frozenset(sight.vision.banned_token_ids if sight else ())
        frame = behaviour.frame + "".join(tokenizer.convert_ids_to_tokens(sorted(self._banned)))
        self._encoder = Encoder(tokenizer, behaviour.end, frame)
        self._lengths = TokenLengths(tokenizer)
        # if the template has no end-of-turn token, turns end with the tokenizer's own, which the template does not
        # write
        closings = (behaviour.closings.words, behaviour.closings.calls)
        self._ends: list[Any] = [
            tokenizer.convert_tokens_to_ids(c.end) if c.end else tokenizer.eos_token_id for c in closings
        ]
        """Token that ends a turn of words, and one with calls."""
        ends: tuple[Any, ...] = (*self._ends, tokenizer.eos_token_id, *eos_token_ids)
        self.stop_token_ids: list[int] = sorted({i for i in ends if i is not None})
        self._foreign = self._foreign_tokens()
        self.info = {**info, "stop_token_ids": self.stop_token_ids}
        self._specs: list[ToolSpec] = []
        self._tools = "[]"
        # the cached functions take JSON, which is hashable and cheaper to create than a render
        self._opening = cached(1024, self._render_opening)
        self._following = cached(4096, self._render_following)
        self._ids = cached(4096, self._encode)

    @property
    def chat_template(self) -> str:
        """The Jinja source in use, which exports include."""
        return self.template.source

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, ending with the generation prompt. Raises RenderError (a ValueError)."""
        plain = self._plain(self._history(messages))
        return self._counted(list(self._opening(json.dumps(plain), self._json(specs))), messages)

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """See Renderer. Appending templates never return None for the conversations that the probes cover."""
        tools = self._json(specs)
        messages = self._history(messages)
        missing = self._missing(ids, calls=new[0]["role"] == "tool")
        following: Sequence[int] | None
        if self.use in (Use.FORK, Use.DROP):
            text = self._encoder.decode([*ids, *missing])
            whole = self.template.render(self._plain(messages), json.loads(tools), prompt=True)
            rest = skip_marked(whole, text)
            following = None if rest is None else self._encoder.encode(rest, follows=True)
        else:
            following = self._following(json.dumps(self._plain(new)), tools)
            if following and ids and ids[-1] in self.stop_token_ids and ids[-1] == following[0]:
                following = following[1:]  # the model has begun what follows, as GLM does
        return None if following is None else self._counted([*missing, *following], new)

    def end_of(self, calls: bool) -> int:
        """Return the token that ends a turn of words, or one with calls."""
        end: int = self._ends[calls]
        return end

    def _missing(self, ids: list[int], calls: bool) -> list[int]:
        """Return what a sampled turn lacks of its closing, if it was cut or ended with another token. `calls`: results
        of calls follow."""
        closing, end = self.behaviour.closings.of(calls), self._ends[calls]
        if closing.opens_next or not closing.end or ids[-1:] == [end]:
            return []
        return [*self._encoder.encode(closing.before), end]

    def _history(self, messages: list[Message]) -> list[Message]:
        """Return messages without the reasoning of the assistant's turns, if it is to be dropped."""
        if self.use is not Use.DROP:
            return messages
        return [_without_reasoning(m, self.behaviour.tags) if m["role"] == "assistant" else m for m in messages]

    def _foreign_tokens(self) -> dict[int, str]:
        """Return the tokens that frame other turns, by id: the model may not write them. Those of reasoning are none,
        and none that ends a turn."""
        behaviour = self.behaviour
        tokens = {
            number: token.content
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.content in behaviour.frame or (token.special and token.content in behaviour.whole_frame)
        }
        own = {number for number, text in tokens.items() if text in behaviour.turns or text in behaviour.tags}
        return {number: text for number, text in tokens.items() if number not in own | set(self.stop_token_ids)}

    def _counted(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages. Raises RenderError if they have more or fewer tokens for images than images."""
        if self.sight is None:
            return ids
        written, given = ids.count(self.sight.vision.image_token_id), len(self._shown(messages))
        if written != given:
            raise RenderError(f"the chat template writes {written} images for messages that have {given}")
        return ids

    def _shown(self, messages: Sequence[Message]) -> list[Any]:
        """Return the images of messages that the template is given."""
        return image_urls(messages) if self.behaviour.images else []

    def parse(
        self, sampled_ids: list[int], first_call: int = 0, prefix: str = "", specs: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """See Renderer. Ids are `call_{n}`. Reasoning goes to `reasoning_content` if the template supports it. The
        message of a text format is its text and has no `tool_calls`."""
        ends = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        text = prefix + self._encoder.decode(sampled_ids[:-1] if ends else sampled_ids)
        reasoning, thought, rest = self.parser.split(text, self.behaviour.opens_reasoning, self.behaviour.tags)
        found = self.parser.parse(rest, specs)
        if error := self._misplaced(sampled_ids, reasoning, rest, found, specs):
            found = Reading(rest.strip(), error=error)
        message: Message = {"role": "assistant", "content": found.content if self.parser.native else rest}
        if not self.behaviour.reasoning:
            message["content"] = thought + message["content"]
        elif reasoning:
            message["reasoning_content"] = reasoning
        arguments = [given for _, given in found.calls]
        roles = turn_roles(
            self._lengths.of(sampled_ids),
            text.removeprefix(prefix),
            (reasoning or "", found.content),
            arguments,
            found.error is not None,
        )
        if found.error is not None:
            return Parsed(message, error=found.error, roles=roles)
        ids = found.ids or [self.parser.call_id(name, first_call + n) for n, (name, _) in enumerate(found.calls)]
        calls = [ToolCall(identity, *call) for identity, call in zip(ids, found.calls, strict=True)]
        if calls and self.parser.native:
            message["tool_calls"] = [call.to_openai() for call in calls]
        return Parsed(message, calls, answer=found.answer, roles=roles)

    def _misplaced(
        self, sampled_ids: list[int], reasoning: str, rest: str, found: Reading, specs: Sequence[ToolSpec]
    ) -> str | None:
        """Return what is wrong with a turn beyond its calls, for the model; None if it is right."""
        if token := next((self._foreign[i] for i in sampled_ids[:-1] if i in self._foreign), None):
            return (
                f"The turn has {token}, which only others' turns begin with: end your turn and wait for what follows."
            )
        if len(found.calls) > 1 and not self.behaviour.parallel_calls:
            return f"This turn has {len(found.calls)} tool calls: write one at a time, and wait for its result."
        if (
            reasoning
            and not rest.strip()
            and (thought := self.parser.parse(reasoning, specs)).calls
            and not thought.error
        ):
            return f"The tool call is inside the reasoning: write {self.behaviour.tags[1]} before it."
        return None

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """See Renderer. Raises ValueError if the tool-call format cannot call these tools."""
        if self.parser.native and not self.behaviour.shows_tools:
            return Parser.instructions(self.parser, specs)
        return self.parser.instructions(specs)

    def instruct(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Message]:
        """See Renderer. Raises RenderError (a ValueError) for calls that the tool-call format cannot express."""
        return [line.message for line in self._transcript(messages, specs)]

    def _transcript(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> list[Line]:
        return transcript(messages, self.parser, specs, self.behaviour.system, self.instructions(specs))

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """See Renderer. Where the chat template has no images in tool messages, they follow in a user message."""
        messages = self.parser.answers(calls, results)
        return messages if self.behaviour.images_of_tools else show_in_user_turns(messages)

    def complaint(self, text: str) -> list[Message]:
        """See Renderer."""
        told = self.parser.complaint(text)
        if self.behaviour.complains_as_tool:
            return told
        return [{**message, "role": "user"} if message["role"] == "tool" else message for message in told]

    def encode(self, prefix: str) -> list[int]:
        """See Renderer. Raises RenderError (a ValueError) for a prefix that opens the reasoning a second time, or that
        has a token that stands for an image."""
        opening = self.behaviour.tags[0].strip()
        if self.behaviour.opens_reasoning and prefix.lstrip().startswith(opening):
            raise RenderError(
                f"rollout.assistant_prefix: got {prefix!r}, but the chat template's generation prompt ends with "
                f"{opening} already; leave it out"
            )
        ids = self._encoder.encode(prefix, follows=True)
        if not self._banned.isdisjoint(ids):
            raise RenderError(
                f"a turn was made to begin with {prefix!r:.100}, which has a token that stands for an image"
            )
        return ids

    def cut(self, text: str, max_tokens: int) -> str | None:
        """See Renderer. The marker is `[... N of M tokens left out ...]`, on a separate line."""
        return self._encoder.cut(text, max_tokens)

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Return a whole conversation as one row, in exactly the pieces of a chain that sampled the messages' text.

        `weight` of a message (OpenAI's fine-tuning convention) is the weight of its tokens: by default 1 for an
        assistant message with its end-of-turn token, 0 for any other. The mask is 1 where the weight is not 0. The
        generation prompt and the rest of a turn's closing have weight 0. The row ends with the last turn's end-of-turn
        token, or with the messages after it. Raises RenderError, naming the message's index, if the template cannot
        render the conversation or rewrites it, or if the tool-call format cannot express it.
        """
        if not self.behaviour.images_of_tools:
            messages = show_in_user_turns(messages)
        lines = self._transcript(messages, specs)
        row = self._row(lines, specs)
        if self.sight is None or not self.behaviour.images:
            return row
        given = [line.message for line in lines]
        self._counted(row.token_ids, given)
        return self.sight.expand_row(row, given)

    def _row(self, lines: list[Line], specs: list[ToolSpec]) -> Row:
        tools = json.loads(self._json(specs))
        plain = self._plain([line.message for line in lines])
        self._check_system(plain)
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
        text = ""  # the row's text so far, as a chain would send it
        start = 0  # index of the first message since the last turn
        for turn in [i for i, m in enumerate(plain) if m["role"] == "assistant"]:
            prompt, closed = rendered(turn, prompt=True), rendered(turn + 1)
            if not prompt.startswith(text):
                raise RenderError(f"message {lines[start].index}: the chat template rewrites the turns before it")
            closing = self.behaviour.closings.of(plain[turn].get("tool_calls"))
            if not (closed.startswith(prompt) and closed.endswith(closing.text)):
                raise RenderError(
                    f"message {lines[turn].index}: the chat template does not render it after a generation prompt"
                )
            if plain[turn].get("tool_calls") and plain[turn]["content"] and not self.behaviour.words_with_calls:
                raise RenderError(
                    f"message {lines[turn].index}: the chat template has no words beside a tool call: empty its content"
                )
            self._add_context(row, prompt, len(text), _spans(rendered, start, turn, prompt, weights))
            said = closed[len(prompt) : len(closed) - len(closing.text)] + closing.before
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
        """Raise RenderError for calls that could not be parsed in a chain, for example if a template does not escape
        the quotes of a string."""
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
                    f"{json.dumps(read, ensure_ascii=False)[:200]}; text of the format itself cannot be in an argument"
                )

    def tokens_agree(self, specs: list[ToolSpec]) -> bool:
        """Return whether the pieces of the probe conversations are the tokens of their whole text."""
        for conversation in self.behaviour.conversations:
            ids = self._row(as_lines(conversation), specs).token_ids
            if not self.behaviour.end:  # the template does not write the token that ends a turn
                ids = [i for i in ids if i != self._ends[False]]
            plain = for_template(conversation)
            whole = self._encoder.encode(self.template.render(plain, json.loads(self._json(specs))))
            if self.behaviour.closings.of(conversation[-1].get("tool_calls")).opens_next:
                ids = ids[:-1]
            if ids != whole[: len(ids)]:
                return False
        return True

    def _add_context(self, row: Row, text: str, begin: int, spans: Spans) -> None:
        """Add text[begin:], tokenised as `open` and `extend` do, with the weights of the spans."""
        if not spans:
            context = self._ids(text[begin:], begin > 0)
            _add(row, context, [0.0] * len(context))
            return
        ids, starts = self._encoder.encode_with_offsets(text[begin:], follows=begin > 0)
        _add(row, ids, [next((w for a, b, w in spans if a <= begin + at < b), 0.0) for at in starts])

    def _encode(self, text: str, follows: bool) -> tuple[int, ...]:
        return tuple(self._encoder.encode(text, follows))

    def _json(self, specs: list[ToolSpec]) -> str:
        """Return the tools as JSON for the chat template; computed only when they change."""
        if specs != self._specs:
            shown = [map_strings(spec.to_openai(), self._encoder.mark) for spec in specs if self.parser.native]
            self._specs, self._tools = list(specs), json.dumps(shown)
        return self._tools

    def _plain(self, messages: list[Message]) -> list[Message]:
        """Return messages for the chat template: text, and images if it has them, without fields that it does not
        support and without control tokens."""
        return [self._plain_message(message) for message in messages]

    def _plain_message(self, message: Message) -> Message:
        known = {key: value for key, value in message.items() if key not in ("info", "weight")}
        if isinstance(known.get("content"), list):
            if self._shown([message]):
                known = for_template([known])[0]
            else:
                known["content"] = text_of(known["content"])
        return map_strings(known, lambda text: self._encoder.mark(text, message["role"]))

    def _render_opening(self, messages: str, tools: str) -> tuple[int, ...]:
        conversation = json.loads(messages)
        self._check_system(conversation)
        return tuple(self._encoder.encode(self.template.render(conversation, json.loads(tools), prompt=True)))

    def _render_following(self, new: str, tools: str) -> tuple[int, ...] | None:
        loose = self.use is Use.KEEP
        text = self.template.continuation(json.loads(new), json.loads(tools), self.behaviour.closings, loose=loose)
        return None if text is None else tuple(self._encoder.encode(text, follows=True))

    def _check_system(self, messages: list[Message]) -> None:
        if not self.behaviour.system and any(message["role"] == "system" for message in messages):
            raise RenderError(
                "the chat template has no system messages: leave out rollout.system_prompt, or put its text into the "
                "first user message"
            )


def _without_reasoning(message: Message, tags: tuple[str, str]) -> Message:
    """Return an assistant's message without its reasoning, unless it is nothing else: many templates refuse a turn that
    is empty."""
    left = {key: value for key, value in message.items() if key != "reasoning_content"}
    if isinstance(left.get("content"), str):
        left["content"] = split_reasoning(left["content"], False, tags)[2]
    return left if left.get("content") or left.get("tool_calls") else message


def _as_texts(arguments: dict[str, Any]) -> dict[str, str]:
    """Return arguments as formats without quotes write them: there, only the tool's schema tells 3 from "3"."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        for key, value in arguments.items()
    }
    return {key.replace(MARK, ""): text.replace(MARK, "") for key, text in texts.items()}


def _spans(rendered: Callable[[int], str], start: int, end: int, whole: str, weights: list[float]) -> Spans:
    """Return where messages[start:end] are in the text `whole`, with their weights; messages of weight 0 are left
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


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    *,
    parser: str = AUTO,
    reasoning: str = Reasoning.AUTO,
    tools: bool = True,
    eos_token_ids: Sequence[int] = (),
    base: Path = Path(),
    log: Log | None = None,
    sight: "Sight | None" = None,
) -> TemplateRenderer:
    """Create a renderer for a tokenizer and a Jinja template (default: the tokenizer's own), after probing the
    template.

    `parser` is the tool-call format, as in `rollout.parser`; a custom parser's file is looked up in `base`. `reasoning`
    is `rollout.reasoning`. `tools`: the chains call tools; without them the template need not render any.
    `eos_token_ids` end a turn in addition to the template's and the tokenizer's own tokens. `log` gets one record,
    `{"renderer": info}`. `sight` is how the model sees; None: it gets images as text. Raises RenderError (a ValueError)
    if the template cannot be used.
    """
    origin = "tokenizer" if chat_template is None else "model.chat_template"
    if chat_template is None and tokenizer.chat_template is None:
        raise RenderError("the tokenizer has no chat template: set model.chat_template to a file with one")
    named = None if parser == AUTO else load_parser(parser, base)
    native = named is None or named.native
    source = tokenizer.get_chat_template(chat_template, tools=[] if tools and native else None)
    reasons = []
    if named is None:
        parser, named, why = _recognised(tokenizer, source)
        reasons.append(why)
    image = None if sight is None else str(tokenizer.convert_ids_to_tokens(sight.vision.image_token_id))
    choice = choose_template(tokenizer, source, tools, named, image, Reasoning(reasoning))
    info: dict[str, Any] = {
        "choice": str(choice.use),
        "reasons": [*reasons, *choice.reasons, *choice.behaviour.notes],
        "rows": choice.trained,
        "template": origin if choice.variant is None else choice.variant,
        "template_sha256": hashlib.sha256(choice.template.source.encode()).hexdigest(),
        "parser": parser,
    }
    if sight is not None:
        sight.shows = choice.behaviour.images
    renderer = TemplateRenderer(
        tokenizer, choice.template, choice.behaviour, named, info, eos_token_ids, sight, choice.use
    )
    info = renderer.info
    if not choice.behaviour.end:
        info["reasons"].append("closes turns with plain text: a turn ends with the tokenizer's end-of-sequence token")
    appends = choice.use in (Use.APPEND, Use.TRAINING_VARIANT)
    if appends and not renderer.tokens_agree(PROBE_TOOLS if tools else []):
        info["reasons"].append("tokens merge across the turn boundary: the boundary is tokenised apart")
    if log:
        log({"renderer": info})
    return renderer


def _recognised(tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[str, Parser, str]:
    """Return the name of the tool-call format that a template writes, its parser, and the reason."""
    found = recognise(tokenizer, source)
    if found is None:  # the probes say what is wrong, if there are tools
        return "hermes", load_parser("hermes"), "no native tool-call format is recognised: hermes"
    name, parser = found
    return name, parser, f"rollout.parser=auto: {name} reads the calls that the template writes"


def load_renderer(
    model: ModelConfig,
    parser: str,
    log: Log | None = None,
    *,
    reasoning: str = Reasoning.AUTO,
    tools: bool = True,
    base: Path = Path(),
    images: Path | None = None,
) -> TemplateRenderer:
    """Create the renderer of a recipe's model; a parser's file is looked up in `base`, the recipe's folder. `images` is
    the folder for the images of the run, for a model that sees; None: they become text.

    Raises ValueError if a file is missing or the template cannot be used.
    """
    source = None
    if model.chat_template is not None:
        file = Path(model.chat_template)
        if not file.is_file():
            raise SettingError("model.chat_template", f"there is no file {file}", "name a Jinja file")
        source = file.read_text(encoding="utf-8")
    return make_renderer(
        load_tokenizer(model.path),
        source,
        parser=parser,
        reasoning=reasoning,
        tools=tools,
        base=base,
        eos_token_ids=_generation_eos(model.path),
        log=log,
        sight=None if images is None else load_sight(model, images),
    )


def load_sight(model: ModelConfig, images: Path) -> "Sight | None":
    """Return how a recipe's model sees, with `images` as the folder of the run's images; None if it reads only text.
    Raises SettingError if the limits on pixels cannot be kept."""
    file = cached_file(model.path, "config.json", _raise_exceptions_for_missing_entries=False)
    if file is None or "vision_config" not in json.loads(Path(file).read_text(encoding="utf-8")):
        return None
    from agentfactory.rollout.images.families import load_vision
    from agentfactory.rollout.images.sight import Sight
    from agentfactory.rollout.images.store import ImageStore

    vision = load_vision(model.path, model.min_image_pixels, model.max_image_pixels)
    return None if vision is None else Sight(vision, ImageStore(images))


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name. Raises ValueError if there is none.

    transformers' AutoTokenizer takes seconds to import and loads torch. It is used only for models whose files name a
    special tokenizer class; for others the tokenizer file is loaded directly.
    """
    try:
        config = cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        name = json.loads(Path(config).read_text(encoding="utf-8")).get("tokenizer_class") if config else None
        if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        problem = f"{path} has no tokenizer that transformers can load: {error}"
        raise SettingError("model.path", problem, "name a model with its tokenizer") from error


def _generation_eos(path: str) -> list[int]:
    """Return the end-of-sequence ids in the model's generation_config.json, if it has one."""
    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    ids = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id") if file else None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
