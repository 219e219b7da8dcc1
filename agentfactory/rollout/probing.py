"""Judges a chat template at start-up by its renders of a set of conversations; no model or family is known by name.

A chain appends what the template puts after a sampled turn, and never renders that turn again. This matches the
template's own format only if the template leaves earlier turns unchanged. The probes check that.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

from agentfactory.rollout.images.parts import for_template, image_part, show_in_user_turns
from agentfactory.rollout.parsers import PARSERS, Call, NativeParser, Parser, load_parser
from agentfactory.rollout.reasoning_tags import reasoning_tags
from agentfactory.rollout.templates import ChatTemplate, Closing, Closings, RenderError, Tools, shared_length
from agentfactory.tools.messages import Message, ToolCall, ToolSpec

_TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\]")
_RENDERS = 5
"""How often one conversation is rendered to see whether the text changes."""
_TURNS, _CHARACTERS = 24, 20_000
"""Length of the longest probe conversation, and of the longest text in one."""


@dataclass
class Behaviour:
    """The findings of the probes.

    `rewrites` says how the template rewrites history (None: it appends); `notes` are harmless findings.
    """

    closings: Closings
    generation_prompt: str
    reasoning: bool
    """Whether it renders the reasoning that a message has in a field of its own; otherwise reasoning stays in the
    content."""
    tags: tuple[str, str]
    """What opens and closes reasoning in a turn."""
    system: bool
    """Whether it renders system messages."""
    frame: str
    """A rendered question, answer and question, which contain the tokens that frame turns."""
    whole_frame: str = ""
    """All tokens that frame turns: also those of system and tool messages."""
    turns: str = ""
    """Rendered turns of the assistant: the tokens in them are its own to write."""
    shows_tools: bool = True
    """Whether it describes the tools; otherwise the system message has to."""
    complains_as_tool: bool = True
    """Whether it renders a tool message that answers no call; otherwise a user message tells of a malformed call."""
    questions_after_results: bool = True
    """Whether it renders a user message right after a result."""
    parallel_calls: bool = True
    """Whether it renders several calls in one turn."""
    words_with_calls: bool = True
    """Whether it renders an assistant's text next to its calls."""
    images: bool = False
    """Whether it renders images in user messages."""
    images_of_tools: bool = True
    """Whether it renders images in tool messages; also if it is never given any."""
    rewrites: str | None = None
    notes: list[str] = field(default_factory=list)
    conversations: list[list[Message]] = field(default_factory=list)
    """The probe conversations that the template rendered."""

    @property
    def end(self) -> str:
        """The token that ends a turn of words; empty if the template closes turns with plain text."""
        return self.closings.words.end

    @property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt opens the reasoning, so that the sampled text contains only its end."""
        return self.generation_prompt.rstrip().endswith(self.tags[0].rstrip())


PROBE_TOOLS = [
    ToolSpec(
        name,
        f"{name} does a thing",
        {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}},
    )
    for name in ("probelook", "probemove")
]


def probe(template: ChatTemplate, tools: bool, parser: Parser, image: str | None = None) -> Behaviour:
    """Judge a template by its renders of the probe conversations.

    `tools`: the chains call tools, in the format of `parser`; the template must support them only if the format is
    native. `image` is the token that stands for an image; None: the model sees none. Raises RenderError with the reason
    if the template cannot be used.
    """
    tools = tools and parser.native
    specs: Tools = [spec.to_openai() for spec in PROBE_TOOLS] if tools else None
    question: list[Message] = [{"role": "user", "content": "wordask"}]
    answer: Message = {"role": "assistant", "content": "wordanswer"}

    def rendered(messages: list[Message], prompt: bool = False) -> str:
        return template.render(messages, specs, prompt)

    closed = _steady(template, [*question, answer], specs)
    before, opened = rendered(question), rendered(question, prompt=True)
    for word in ("wordask", "wordanswer"):
        if word not in closed:
            raise RenderError(f"the chat template drops text from a message ({word!r} is not in {closed!r})")
    header = closed[len(before) :].split("wordanswer")[0] if closed.startswith(before) else ""
    if opened == before and header.strip():
        raise RenderError("the chat template has no generation prompt: it ignores add_generation_prompt")
    reasoned = _find_reasoning(template, [*question, answer], specs)
    words = _closing_of_words(template, closed, specs)
    behaviour = Behaviour(
        Closings(words, words),
        generation_prompt=opened[len(before) :] if opened.startswith(before) else "",
        reasoning=reasoned is not None,
        tags=reasoning_tags(template.source if reasoned is None else reasoned),
        system=_shows(template, [{"role": "system", "content": "wordsystem"}, *question], specs, "wordsystem"),
        frame=template.render([*question, answer, *question], prompt=True),
        turns=closed[turn_start(opened, closed) :] + (reasoned or closed)[turn_start(opened, closed) :],
    )
    behaviour.whole_frame = behaviour.frame
    if _writes_clock(template, question, specs):
        behaviour.notes.append("writes the date or the time: all prompts of this process have those of its start")
    if not behaviour.system:
        behaviour.notes.append("has no system messages: a conversation with one is refused")
    if tools:
        _check_tools(template, opened, behaviour, parser, specs)
    if image is not None:
        _probe_images(rendered, behaviour, image, parser if tools else None)
    behaviour.conversations = _conversations(behaviour, parser if tools else None)
    if _shows(template, [*question, {"role": "user", "content": "wordagain"}], specs, "wordagain"):
        behaviour.conversations.append([*question, answer, *question, {"role": "user", "content": "wordagain"}, answer])
    else:
        behaviour.notes.append("refuses two user messages in a row")
    behaviour.conversations += _long_conversations(behaviour, parser if tools else None)
    for conversation in behaviour.conversations:
        behaviour.rewrites = behaviour.rewrites or _rewrites(
            template, behaviour.closings, for_template(conversation), specs
        )
    return behaviour


def _shows(template: ChatTemplate, messages: list[Message], specs: Tools, word: str) -> bool:
    try:
        return word in template.render(messages, specs, prompt=True)
    except RenderError:
        return False


def _steady(template: ChatTemplate, messages: list[Message], specs: Tools) -> str:
    """Return a conversation's text. Raises RenderError if it is another one each time."""
    text = template.render(messages, specs)
    for _ in range(_RENDERS):
        if (other := template.render(messages, specs)) != text:
            at = max(0, shared_length(text, other) - 20)
            raise RenderError(
                "the chat template gives another text each time it renders a conversation: "
                f"{text[at : at + 60]!r}, then {other[at : at + 60]!r}"
            )
    return text


def _writes_clock(template: ChatTemplate, messages: list[Message], specs: Tools) -> bool:
    """Return whether the text depends on the date or the time."""
    text, clock = template.render(messages, specs), template.clock
    template.clock = clock + timedelta(days=399, hours=5, minutes=7, seconds=11)
    try:
        return template.render(messages, specs) != text
    finally:
        template.clock = clock


def _find_reasoning(template: ChatTemplate, messages: list[Message], specs: Tools) -> str | None:
    """Find the field in which the template takes reasoning, and return a turn with reasoning; None if it has none."""
    *question, answer = messages
    for name in ("reasoning_content", "reasoning", "thinking"):
        template.reasoning_field = name
        try:
            text = template.render([*question, {**answer, "reasoning_content": "wordreason"}], specs)
        except RenderError:
            continue
        if "wordreason" in text:
            return text
    template.reasoning_field = "reasoning_content"
    return None


def _closing_of_words(template: ChatTemplate, closed: str, specs: Tools) -> Closing:
    """Return how the template closes a turn of words, which `closed` ends with."""
    tail = closed.rpartition("wordanswer")[2]
    if tail:
        return template.closing_of(tail)
    question: Message = {"role": "user", "content": "wordask"}
    answer: Message = {"role": "assistant", "content": "wordanswer"}
    following = template.render([question, answer, question], specs)
    return _opening_of_next(template, following.rpartition("wordanswer")[2])


def _opening_of_next(template: ChatTemplate, following: str) -> Closing:
    """Return the closing of turns that end with the token that opens the next."""
    token = template.leading_token(following)
    return Closing(end=token, opens_next=True) if token else Closing()


def turn_start(opened: str, *turns: str) -> int:
    """Return where the assistant's own text begins, given a generation prompt and texts with turns. Where they differ
    within a tag, it begins with the tag: `<think>` and `<tool_call>` share two letters."""
    at = min(shared_length(opened, text) for text in turns)
    for text in (opened, *turns):
        window = max(0, at - 70)
        for found in _TAG.finditer(text, window, at + 70):
            if found.start() < at < found.end():
                at = found.start()
    return at


def _call(parser: Parser, name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return ToolCall(parser.call_id(name, number), name, arguments).to_openai()


def _probe_calls(parser: Parser, number: int, words: str = "") -> tuple[list[Message], list[Call]]:
    """Return a conversation that ends with a turn of one or two calls, and the calls."""
    calls = [
        _call(parser, "probelook", 0, zeta="wordzeta", alpha=3),
        _call(parser, "probemove", 1, alpha=4, zeta="wordeta"),
    ][:number]
    turn: Message = {"role": "assistant", "content": words, "tool_calls": calls}
    return [{"role": "user", "content": "wordask"}, turn], [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


def _results(calls: list[dict[str, Any]]) -> list[Message]:
    return [
        {"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": f"wordresult{number}"}
        for number, c in enumerate(calls)
    ]


def fit_calls(template: ChatTemplate, parser: Parser, specs: Tools) -> str:
    """Find the form in which the template takes calls, and return a turn with one. Raises RenderError."""
    messages, expected = _probe_calls(parser, 1)
    reason = None
    for as_text, null in product((False, True), (False, True)):
        template.arguments_as_text, template.null_content = as_text, null
        try:
            text = template.render(messages, specs)
        except RenderError as error:
            reason = reason or error
            continue
        # a template that writes Python's way, with single quotes, wants the arguments as JSON text
        if expected[0][0] in text.rpartition("wordask")[2] and "{'zeta'" not in text:
            return text
        reason = reason or RenderError("it leaves them out")
    template.arguments_as_text = template.null_content = False
    if isinstance(parser, NativeParser) and parser.marks and _has(template, parser.marks):
        template.write_calls = lambda calls: parser.write_as_content([_as_call(call) for call in calls], PROBE_TOOLS)
        return template.render(messages, specs)
    if str(reason) == "it leaves them out":
        raise RenderError("the chat template cannot render a tool call: it leaves them out")
    raise RenderError(f"the chat template cannot render a tool call: {reason}") from reason


def _has(template: ChatTemplate, tokens: tuple[str, ...]) -> bool:
    """Return whether the tokenizer has all of these tokens."""
    added = {token.content for token in template.tokenizer.added_tokens_decoder.values()}
    return added.issuperset(tokens)


def _as_call(call: dict[str, Any]) -> Call:
    arguments = call["function"]["arguments"]
    return call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def said(text: str, opened: str, tags: tuple[str, str], parser: Parser, closing: Closing) -> str:
    """Return what a turn at the end of `text` says after its reasoning: what `parser` gets. `opened` is the
    conversation before it, with the generation prompt."""
    turn = text[turn_start(opened, text) :].rstrip() if not closing.text else text[turn_start(opened, text) :]
    turn = turn.removesuffix(closing.text)
    opens = opened.rstrip().endswith(tags[0].rstrip())
    within = opens and (text.startswith(opened) or turn.lstrip().startswith(tags[1]))
    return parser.split(turn, within, tags)[2]


def _check_tools(template: ChatTemplate, opened: str, behaviour: Behaviour, parser: Parser, specs: Tools) -> None:
    """Raise RenderError if the template cannot show calls or results, or writes calls that the parser cannot read."""

    def reads(text: str, closing: Closing, expected: list[Call]) -> bool:
        found = parser.parse(said(text, opened, behaviour.tags, parser, closing), PROBE_TOOLS)
        return found.calls == expected and not found.content

    def reads_call_at(closing: Closing) -> bool:
        return parser.parse(said(text, opened, behaviour.tags, parser, closing), PROBE_TOOLS).calls == expected

    ignores = not all(spec.name in opened for spec in PROBE_TOOLS)
    unseen = RenderError(f"the chat template ignores `tools`: the model would not know of them; {_plain_text()}")
    messages, expected = _probe_calls(parser, 1)
    try:
        text = fit_calls(template, parser, specs)
    except RenderError as error:
        raise (unseen if ignores else error) from error
    turn = text.rpartition("wordask")[2]
    words = behaviour.closings.words
    if not any(reads_call_at(closing) for closing in (words, Closing(end=template.trailing_token(text)))):
        if ignores:
            raise unseen
        raise RenderError(
            f"the chat template writes tool calls in a format that rollout.parser does not read: {turn!r}; "
            f"{_formats_that_read(template)}"
        )
    told = _results(messages[1]["tool_calls"])
    try:
        after = template.render([*messages, *told], specs)
    except RenderError as error:
        raise RenderError(f"the chat template cannot render a tool message: {error}") from error
    if "wordresult0" not in after:
        raise RenderError("the chat template cannot render a tool message: it leaves them out")
    closing = _closing_of_calls(template, text, after, words, lambda ending: reads(text, ending, expected))
    behaviour.closings = Closings(words, closing)
    behaviour.turns += text[turn_start(opened, text) :].removesuffix(closing.text)
    behaviour.whole_frame += after[len(text) :] if after.startswith(text) else ""
    behaviour.questions_after_results = _shows(template, [*messages, *told, messages[0]], specs, "wordresult0")
    if template.write_calls is not None:
        behaviour.notes.append("leaves out tool calls: they are in the content, as the tokenizer's tokens mark them")
    if ignores:
        behaviour.shows_tools = False
        behaviour.notes.append("ignores `tools`: the system message describes them")
    _probe_two_calls(template, behaviour, parser, specs, reads)
    if parser.write(expected[:1], PROBE_TOOLS) not in text:
        behaviour.notes.append("re-serialises tool calls: sampled ids are kept")
    beside, _ = _probe_calls(parser, 1, "wordbeside")
    try:
        shown = said(template.render(beside, specs), opened, behaviour.tags, parser, closing)
        found = parser.parse(shown, PROBE_TOOLS)
    except RenderError:
        found = None
    if found is None or found.calls != expected or "wordbeside" not in found.content:
        behaviour.words_with_calls = False
        behaviour.notes.append("has no words beside a tool call")
    if not behaviour.closings.calls.opens_next and closing.end != words.end:
        behaviour.complains_as_tool = False
    else:
        turn_of_words: Message = {"role": "assistant", "content": "wordtwo"}
        told = [messages[0], turn_of_words, {"role": "tool", "content": "wordthree"}]
        behaviour.complains_as_tool = all(
            _shows(template, conversation, specs, "wordthree") for conversation in (told, [*told, turn_of_words])
        )
    if not behaviour.complains_as_tool:
        behaviour.notes.append("has no tool message without a call: a user message tells of a malformed call")


def _closing_of_calls(
    template: ChatTemplate, text: str, after: str, words: Closing, reads: Callable[[Closing], bool]
) -> Closing:
    """Return how the template closes a turn with a call, which ends `text`; `after` goes on with its result."""
    if words.text and text.endswith(words.text):
        return words
    token = template.trailing_token(text)
    ending = Closing(end=token, after=text.rpartition(token)[2] if token else "")
    if token and reads(ending):
        return ending
    if after.startswith(text) and (token := template.leading_token(after[len(text) :])):
        closing = Closing(end=token, opens_next=True)
        if reads(closing):
            return closing
    turn = text.rpartition("wordask")[2]
    raise RenderError(f"the chat template closes a turn with calls otherwise than a turn of text: {turn!r}")


def _probe_two_calls(
    template: ChatTemplate,
    behaviour: Behaviour,
    parser: Parser,
    specs: Tools,
    reads: Callable[[str, Closing, list[Call]], bool],
) -> None:
    """Find out whether a turn may have two calls. Raises RenderError if their results cannot be shown."""
    messages, expected = _probe_calls(parser, 2)
    try:
        text = template.render(messages, specs)
    except RenderError:  # many say so: "This model only supports single tool-calls at once!"
        behaviour.parallel_calls = False
        behaviour.notes.append("refuses two tool calls in one turn: a turn with several is malformed")
        return
    if not reads(text, behaviour.closings.calls, expected):
        behaviour.parallel_calls = False
        behaviour.notes.append("writes only one tool call in one turn: a turn with several is malformed")
        return
    try:
        after = template.render([*messages, *_results(messages[1]["tool_calls"])], specs)
    except RenderError as error:
        raise RenderError(f"the chat template cannot render two tool messages in a row: {error}") from error
    if not all(f"wordresult{n}" in after for n in range(2)):
        raise RenderError("the chat template cannot render two tool messages in a row: it leaves them out")


def _probe_images(
    rendered: Callable[[list[Message]], str], behaviour: Behaviour, image: str, parser: Parser | None
) -> None:
    """Find out whether the template renders images of people and of tools, each as one token."""
    parts = [{"type": "text", "text": "wordbefore"}, {"type": "image"}, {"type": "text", "text": "wordafter"}]

    def shows(*messages: Message) -> bool:
        try:
            text = rendered(list(messages))
        except RenderError:
            return False
        before, _, after = text.partition(image)
        return text.count(image) == 1 and "wordbefore" in before and "wordafter" in after

    behaviour.images = shows({"role": "user", "content": parts})
    if not behaviour.images:
        behaviour.notes.append("has no images: the model gets them as text")
    elif parser is not None:
        turn: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [_call(parser, "probelook", zeta="z", alpha=3)],
        }
        told: Message = {
            "role": "tool",
            "name": "probelook",
            "tool_call_id": parser.call_id("probelook", 0),
            "content": parts,
        }
        behaviour.images_of_tools = shows({"role": "user", "content": "wordask"}, turn, told)
        if not behaviour.images_of_tools:
            behaviour.notes.append("has no images in tool messages: they follow in a user message")


def _formats_that_read(template: ChatTemplate) -> str:
    """Suggest formats for a template whose calls the chosen parser cannot read."""
    native = {name: parser for name in PARSERS if (parser := load_parser(name)).native}
    fit = [n for n, parser in native.items() if reads_call(ChatTemplate(template.tokenizer, template.source), parser)]
    return f"use rollout.parser={' or '.join(fit)}" if fit else f"none of {', '.join(native)} does; {_plain_text()}"


def reads_call(template: ChatTemplate, parser: Parser) -> tuple[str, list[Call]] | None:
    """Return a turn with a call as the template writes it, and the call, if `parser` reads it; otherwise None."""
    specs: Tools = [spec.to_openai() for spec in PROBE_TOOLS]
    question: list[Message] = [{"role": "user", "content": "wordask"}]
    answer: Message = {"role": "assistant", "content": "wordanswer"}
    _, expected = _probe_calls(parser, 1)
    try:
        opened = template.render(question, specs, prompt=True)
        words = _closing_of_words(template, template.render([*question, answer], specs), specs)
        text = fit_calls(template, parser, specs)
    except RenderError:
        return None
    tags = reasoning_tags(_find_reasoning(template, [*question, answer], specs) or template.source)
    for closing in (words, Closing(end=template.trailing_token(text))):
        if parser.parse(said(text, opened, tags, parser, closing), PROBE_TOOLS).calls == expected:
            return text, expected
    return None


def _plain_text() -> str:
    """Suggest plain-text formats for a template that supports no native one."""
    return f"act in plain text: rollout.parser={' or '.join(n for n in PARSERS if not load_parser(n).native)}"


def _conversations(behaviour: Behaviour, parser: Parser | None) -> list[list[Message]]:
    """Return conversations of the kinds that chains have, with the reasoning where the parser would put it.

    Turns end with full stops because many tokenizers would merge their last letters with a newline of the template.
    """

    def said(word: str, reason: str = "", calls: list[dict[str, Any]] | None = None) -> Message:
        message: Message = {"role": "assistant", "content": word}
        if reason and behaviour.reasoning:
            message["reasoning_content"] = reason
        elif reason:
            message["content"] = f"{behaviour.tags[0].strip()}\n{reason}\n{behaviour.tags[1]}\n\n{word}"
        if calls:
            message["tool_calls"] = calls if behaviour.parallel_calls else calls[-1:]
            message["content"] = message["content"] if behaviour.words_with_calls else ""
        return message

    def asked(word: str) -> Message:
        return {"role": "user", "content": word}

    conversations = [
        [
            asked("wordone"),
            said("wordtwo."),
            asked("wordthree"),
            said("wordfour."),
            asked("wordfive"),
            said("wordsix."),
        ],
        [asked("wordone"), said("wordtwo", "wordwhy"), asked("wordthree"), said("wordfour", "wordwherefore")],
    ]
    if parser is not None:
        look = _call(parser, "probelook", 0, zeta="wordzeta", alpha=3)
        move = _call(parser, "probemove", 1, alpha=4, zeta="wordeta")

        def result(call: dict[str, Any], word: str) -> Message:
            return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": word}

        conversations += [
            [
                asked("wordone"),
                said("wordtwo", calls=[look]),
                result(look, "wordthree"),
                said("", calls=[move, look]),
                *([result(move, "wordfour")] if behaviour.parallel_calls else []),
                result(look, "wordfive"),
                said("wordsix"),
                asked("wordseven"),
                said("", calls=[move]),
                result(move, "wordeight"),
                said("wordnine"),
            ],
            [
                asked("wordone"),
                said("", "wordwhy", [look]),
                result(look, "wordtwo"),
                said("wordthree", "wordwherefore", [move]),
                result(move, "wordfour"),
                *([] if behaviour.questions_after_results else [said("wordmore.")]),
                asked("wordfive"),
                said("wordsix", "wordhence"),
                asked("wordseven"),
                said("wordeight", "wordthus"),
            ],
            # the answer to a malformed call has no call to refer to
            [
                asked("wordone"),
                said("wordtwo"),
                {"role": "tool" if behaviour.complains_as_tool else "user", "content": "wordthree"},
                said("wordfour"),
            ],
        ]
    if behaviour.images:
        image = image_part("image")
        seen = [{"type": "text", "text": "wordsee"}, image]
        conversations.append(
            [{"role": "user", "content": seen}, said("wordtwo."), asked("wordthree"), said("wordfour.")]
        )
        if parser is not None:
            told = [{**result(look, ""), "content": seen}]
            told = told if behaviour.images_of_tools else show_in_user_turns(told)
            conversations.append(
                [{"role": "user", "content": [image]}, said("wordtwo", calls=[look]), *told, said("wordfour.")]
            )
    if behaviour.system:
        conversations += [[{"role": "system", "content": "wordsystem"}, *c] for c in conversations]
    return conversations


def _long_conversations(behaviour: Behaviour, parser: Parser | None) -> list[list[Message]]:
    """Return a conversation of many turns, and one of long messages: some templates leave out what is far back, or cut
    what is long."""
    long = "wordlong " * (_CHARACTERS // 9)
    texts = ("wordmany.", long)
    conversations: list[list[Message]] = []
    for text, turns in zip(texts, (_TURNS, 2), strict=True):
        conversations.append([])
        for number in range(turns):
            question: Message = {"role": "user", "content": f"word{number} {text}"}
            conversations[-1] += [question, {"role": "assistant", "content": f"word{number} {text}"}]
        if parser is not None:
            conversations.append([{"role": "user", "content": "wordask"}])
            for number in range(turns):
                call = _call(parser, "probelook", number, zeta=f"word{number}", alpha=number)
                turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
                told = {**_results([call])[0], "content": f"word{number} {text}"}
                conversations[-1] += [turn, told]
            conversations[-1].append({"role": "assistant", "content": "wordend."})
    return conversations


def _rewrites(template: ChatTemplate, closings: Closings, conversation: list[Message], specs: Tools) -> str | None:
    """Return how the template breaks an append-only chain on this conversation; None if it does not."""
    turns = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    prompts = {i: template.render(conversation[:i], specs, prompt=True) for i in turns}
    whole = template.render(conversation, specs)
    for i, following in zip(turns, [*turns[1:], None], strict=True):
        ended = template.render(conversation[: i + 1], specs)
        ended = ended.removesuffix(closings.of(conversation[i].get("tool_calls")).after)
        if not ended.startswith(prompts[i]):
            return f"rewrites history: an assistant turn does not begin with the generation prompt {prompts[i][-40:]!r}"
        turn = conversation[i]
        said = [word for word in dict.fromkeys(turn["content"].split()) if word.startswith("word")] + [
            turn.get("reasoning_content")
        ]
        if lost := [word for word in said if word and word not in ended[len(prompts[i]) :]]:
            return f"rewrites history: drops {lost[0]!r} (reasoning) from an assistant turn"
        for later in (*(prompts[j] for j in turns if j > i), whole):
            if not later.startswith(ended):
                at = shared_length(ended, later)
                return (
                    f"rewrites history: {ended[at : at + 40]!r} of an assistant turn becomes {later[at : at + 40]!r} "
                    "once messages follow"
                )
        if following is not None:
            new = conversation[i + 1 : following]
            if template.continuation(new, specs, closings) != prompts[following][len(ended) :]:
                return "rewrites history: what follows a turn depends on the turns before it"
    return None
