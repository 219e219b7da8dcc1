"""The renderer, which converts messages to token ids and back, and never tokenises sampled text again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentfactory.base.messages import Message, ToolCall, ToolSpec, text_of
from agentfactory.rollout.images.image_intake import Images, TextOnly
from agentfactory.rollout.images.parts import for_template, image_urls
from agentfactory.rollout.text.conversation_rows import ConversationRows
from agentfactory.rollout.text.dialogue import Dialogue, Line, as_lines
from agentfactory.rollout.text.encoding import Encoder, map_strings, skip_marked
from agentfactory.rollout.text.parsers import Parser, Reading
from agentfactory.rollout.text.parsers.parser import split_reasoning
from agentfactory.rollout.text.stop_strings import find_stop, tokens_of
from agentfactory.rollout.text.template_and_format import Use
from agentfactory.rollout.text.templates import Behaviour, ChatTemplate, RenderError, cached
from agentfactory.rollout.text.token_roles import token_length, turn_roles
from agentfactory.rollout.token_row import Row


@dataclass(frozen=True)
class Parsed:
    """The content of a sampled turn. `error`, written for the model, describes a malformed one, of which no call is
    run. `answer` is the final answer if the format marks one. `roles` has a letter per token; empty: unknown."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None
    answer: str | None = None
    roles: str = ""


class Renderer:
    """A renderer of any chat template, by differences of renders.

    The caller concatenates the pieces for the server: `open`, then sampled ids, which are kept unchanged, and `extend`
    alternately. The text after a turn is the difference of two renders of a short dummy conversation, tokenised
    separately. `info["choice"]` is the use of the template:

    - `append`: the template leaves earlier turns unchanged; `extend` returns ids.
    - `training variant`: the same, with TRL's variant of a template that rewrites earlier turns.
    - `keep`: the template rewrites earlier turns, but `extend` returns ids anyway.
    - `fork`: the template rewrites history. `extend` returns ids only if the re-rendered conversation begins exactly
      with the text of `ids` and the closing of the turn; otherwise None.
    - `drop`: the same, but the reasoning of earlier turns is removed from the conversation before rendering.

    A turn ends with one of `stop_token_ids`, or with the token that completes one of `stops` outside its reasoning; one
    that was cut before gets the template's closing, as context. Ids have one token per image, which the caller expands.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        behaviour: Behaviour,
        parser: Parser,
        info: dict[str, Any],
        eos_token_ids: Sequence[int] = (),
        images: Images | None = None,
        use: Use = Use.APPEND,
    ) -> None:
        self.tokenizer = tokenizer
        self.use = use
        self.template = template
        self.behaviour = behaviour
        self.parser = parser
        self.dialogue = Dialogue(
            parser, behaviour.system, behaviour.shows_tools, behaviour.images_of_tools, behaviour.complains_as_tool
        )
        self.images = images or TextOnly()
        # tokens that only the template may write, even in an assistant's text
        self._banned = frozenset(() if self.images.vision is None else self.images.vision.banned_token_ids)
        frame = behaviour.frame + "".join(tokenizer.convert_ids_to_tokens(sorted(self._banned)))
        self._encoder = Encoder(tokenizer, behaviour.end, frame)
        self._length = cache(partial(token_length, tokenizer))
        # if the template writes no end-of-turn token, turns end with the tokenizer's own
        closings = (behaviour.closings.words, behaviour.closings.calls)
        eos: Any = tokenizer.eos_token_id
        self.ends: list[Any] = [tokenizer.convert_tokens_to_ids(c.end) if c.end else eos for c in closings]
        """The token that ends a text turn, and the one for a turn with calls."""
        self.stop_token_ids: list[int] = sorted({i for i in (*self.ends, eos, *eos_token_ids) if i is not None})
        self.stops = parser.stops
        # tokens that frame others' turns, without reasoning tags and end-of-turn tokens
        self._foreign = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if (token.content in behaviour.frame or (token.special and token.content in behaviour.whole_frame))
            and not (token.content in behaviour.turns or token.content in behaviour.tags)
            and number not in self.stop_token_ids
        }
        self.info = {**info, "stop_token_ids": self.stop_token_ids, "stops": list(self.stops)}
        self._specs: list[ToolSpec] = []
        self._tools = "[]"
        # the cached functions take JSON, which is hashable and cheaper than a render
        self._opening = cached(1024, self._render_opening)
        self._following = cached(4096, self._render_following)
        self._rows = ConversationRows(template, behaviour, parser, self._encoder, self.ends)

    def open(self, messages: list[Message], specs: list[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, ending with the generation prompt. Raises RenderError (a ValueError)."""
        plain = self._plain(self._history(messages))
        return self._counted(list(self._opening(json.dumps(plain), self._json(specs))), messages)

    def extend(
        self, ids: list[int], messages: list[Message], new: list[Message], specs: list[ToolSpec]
    ) -> list[int] | None:
        """Return the ids to append to `ids`, which end with a sampled turn, for `new`, the last of `messages`, and the
        next turn. None: the template rewrites history here, so begin a new row with `open(messages, specs)`."""
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
            closing = self.behaviour.closings.of(new[0]["role"] == "tool")
            before = len(self._encoder.encode(closing.before)) if closing.opens_next else 0
            if following and ids and ids[-1] in self.stop_token_ids and ids[-1] in following[before : before + 1]:
                following = following[before + 1 :]  # the model has already sampled the token, as GLM does
        return None if following is None else self._counted([*missing, *following], new)

    def _missing(self, ids: list[int], calls: bool) -> list[int]:
        """Return the missing part of a sampled turn's closing, if it was cut or ended with another token."""
        closing, end = self.behaviour.closings.of(calls), self.ends[calls]
        if closing.opens_next or not closing.end or ids[-1:] == [end]:
            return []
        return [*self._encoder.encode(closing.before), end]

    def _history(self, messages: list[Message]) -> list[Message]:
        if self.use is not Use.DROP:
            return messages
        return [_without_reasoning(m, self.behaviour.tags) if m["role"] == "assistant" else m for m in messages]

    def _counted(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        if self.images.vision is None:
            return ids
        written, given = ids.count(self.images.vision.image_token_id), len(self._shown(messages))
        if written != given:
            raise RenderError(f"the chat template writes {written} image tokens for messages with {given} images")
        return ids

    def _shown(self, messages: Sequence[Message]) -> list[Any]:
        return image_urls(messages) if self.behaviour.images else []

    def parse(self, sampled_ids: list[int], first_call: int = 0, specs: Sequence[ToolSpec] = ()) -> Parsed:
        """Parse a sampled turn into a message; its calls are numbered from `first_call` (the chain's calls so far).
        In a text format, the message has no `tool_calls`; `specs` type arguments."""
        text = self.decode(sampled_ids)
        reasoning, thought, rest = self._split(text)
        stop = find_stop(rest, self.stops)
        found = self.parser.parse(rest if stop is None else rest[: stop[0]], specs)
        if error := self._misplaced(sampled_ids, reasoning, rest, found, specs):
            found = Reading(rest.strip(), error=error)
        message = self._message(reasoning, thought, found.content if self.parser.native else rest)
        words, arguments = (reasoning, found.content), [given for _, given in found.calls]
        malformed = found.error is not None
        roles = turn_roles(list(map(self._length, sampled_ids)), text, words, arguments, malformed)
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
        if token := next((self._foreign[i] for i in sampled_ids[:-1] if i in self._foreign), None):
            problem = f"The turn has {token}, which only others' turns begin with"
            return f"{problem}: end your turn and wait for what follows."
        if len(found.calls) > 1 and not self.behaviour.parallel_calls:
            return f"This turn has {len(found.calls)} tool calls: write one at a time, and wait for its result."
        if reasoning and not rest.strip() and self.parser.parse(reasoning, specs).calls:
            return f"The tool call is inside the reasoning: write {self.behaviour.tags[1]} before it."
        return None

    def _split(self, text: str) -> tuple[str, str, str]:
        return self.parser.split(text, self.behaviour.opens_reasoning, self.behaviour.tags)

    def _message(self, reasoning: str, thought: str, words: str) -> Message:
        if not self.behaviour.reasoning:
            return {"role": "assistant", "content": thought + words}
        message: Message = {"role": "assistant", "content": words}
        return {**message, "reasoning_content": reasoning} if reasoning else message

    def parse_text(self, sampled_ids: list[int]) -> Parsed:
        """Parse a sampled turn without tools into a message, even if its text looks like a call."""
        text = self.decode(sampled_ids)
        reasoning, thought, rest = self._split(text)
        found = self.parser.parse(rest)
        framed = not found.calls and not found.error and found.content != rest.strip()
        words = found.content if framed else rest  # some formats also write marks around text
        roles = turn_roles(list(map(self._length, sampled_ids)), text, (reasoning, words), [], False)
        return Parsed(self._message(reasoning, thought, words), roles=roles)

    def continuation(self, text: str) -> list[int]:
        """Return the ids of text from others that follows a turn without an end-of-turn token."""
        return self._encoder.encode(self._encoder.mark(text, "assistant"), follows=True)

    def stopped(self, ids: list[int]) -> int | None:
        """Return the number of a turn's ids up to the one that completes a stop string; None without a stop string."""
        if not self.stops:
            return None
        text = self.decode(ids)
        found = find_stop(text, self.stops, len(self._split(text)[1]))
        return None if found is None else tokens_of(found[0] + len(found[1]), ids, self.decode)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without a final end-of-turn token."""
        ends = bool(ids) and ids[-1] in self.stop_token_ids
        return self._encoder.decode(ids[:-1] if ends else ids)

    def encode(self, prefix: str) -> list[int]:
        """Return the ids of the forced beginning of each turn (`rollout.assistant_prefix`). Raises RenderError (a
        ValueError) for a prefix that opens the reasoning a second time or contains an image token."""
        opening = self.behaviour.tags[0].strip()
        if self.behaviour.opens_reasoning and prefix.lstrip().startswith(opening):
            problem = f"got {prefix!r}, but the chat template's generation prompt ends with {opening} already"
            raise RenderError(f"rollout.assistant_prefix: {problem}; leave it out")
        ids = self._encoder.encode(prefix, follows=True)
        if not self._banned.isdisjoint(ids):
            raise RenderError(f"the prefix of a turn, {prefix!r:.100}, must not contain an image token")
        return ids

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text`, leaving at most `max_tokens` tokens and a marker; None if it fits."""
        return self._encoder.cut(text, max_tokens)

    def conversation_row(self, messages: list[Message], specs: list[ToolSpec]) -> Row:
        """Return a whole conversation as one row, tokenised in exactly the pieces of a chain with these messages.
        `weight` of a message (OpenAI's fine-tuning convention) is the weight of its tokens: by default 1 for an
        assistant message with its end-of-turn token, 0 for any other, for the generation prompt and for the rest of a
        turn's closing. The mask is 1 where the weight is not 0. The row ends with the last turn's end-of-turn token, or
        with the messages after it. Raises RenderError, naming the message's index, if the template cannot render the
        conversation or rewrites it, or if the tool-call format cannot express it."""
        lines = self.dialogue.lines(messages, specs)
        row = self._row(lines, specs)
        if isinstance(self.images, TextOnly) or not self.behaviour.images:
            return row
        given = [line.message for line in lines]
        self._counted(row.token_ids, given)
        return self.images.expand_row(row, given)

    def _row(self, lines: list[Line], specs: list[ToolSpec]) -> Row:
        plain = self._plain([line.message for line in lines])
        self._check_system(plain)
        return self._rows.row(lines, plain, json.loads(self._json(specs)), specs)

    def tokens_agree(self, specs: list[ToolSpec]) -> bool:
        """Return whether tokenising the probe conversations in pieces gives the tokens of the whole text."""
        for conversation in self.behaviour.conversations:
            ids = self._row(as_lines(conversation), specs).token_ids
            if not self.behaviour.end:  # the template does not write the end-of-turn token
                ids = [i for i in ids if i != self.ends[False]]
            plain = for_template(conversation)
            whole = self._encoder.encode(self.template.render(plain, json.loads(self._json(specs))))
            closing = self.behaviour.closings.of(conversation[-1].get("tool_calls"))
            if closing.opens_next:
                ids = ids[: -1 - len(self._encoder.encode(closing.before))]
            if ids != whole[: len(ids)]:
                return False
        return True

    def _json(self, specs: list[ToolSpec]) -> str:
        if specs != self._specs:
            shown = [map_strings(spec.to_openai(), self._encoder.mark) for spec in specs if self.parser.native]
            self._specs, self._tools = list(specs), json.dumps(shown)
        return self._tools

    def _plain(self, messages: list[Message]) -> list[Message]:
        """Return messages for the chat template, without fields, images and control tokens that it must not get."""
        plain = []
        for message in messages:
            known = {key: value for key, value in message.items() if key not in ("info", "weight")}
            if self._shown([message]):
                known = for_template([known])[0]
            elif isinstance(known.get("content"), list):
                known["content"] = text_of(known["content"])
            plain.append(map_strings(known, partial(self._encoder.mark, role=message["role"])))
        return plain

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
            fix = "leave out rollout.system_prompt, or put its text into the first user message"
            raise RenderError(f"the chat template has no system messages: {fix}")


def _without_reasoning(message: Message, tags: tuple[str, str]) -> Message:
    """Return an assistant message without its reasoning, unless it is empty then, which many templates refuse."""
    left = {key: value for key, value in message.items() if key != "reasoning_content"}
    if isinstance(left.get("content"), str):
        left["content"] = split_reasoning(left["content"], False, tags)[2]
    return left if left.get("content") or left.get("tool_calls") else message
