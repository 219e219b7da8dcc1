"""Probes of a template's description of tools, its calls and results, and the parts of an assistant's turn."""

import re
from collections.abc import Callable
from itertools import product

from agentfactory.base.messages import Message
from agentfactory.rollout.text.parsers import PARSERS, Call, NativeParser, Parser, Reading, load_parser
from agentfactory.rollout.text.parsers.parser import call_of, reasoning_tags
from agentfactory.rollout.text.probing.conversations import ANSWER, PROBE_TOOLS, QUESTION, probe_calls, results_of
from agentfactory.rollout.text.templates import (
    Behaviour,
    ChatTemplate,
    Closing,
    Closings,
    RenderError,
    Tools,
    shared_length,
)

_TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\]")
_OPENING_TAG = re.compile(r"<[^<>/\s][^<>\s]*>|\[[A-Z_]+\]")
_EXAMPLE = re.compile(r"\s*(?:[{\[(]|<[^/])")
USE = "use rollout.parser="


def check_tools(template: ChatTemplate, opened: str, behaviour: Behaviour, parser: Parser, specs: Tools) -> None:
    """Raise RenderError if the template cannot render calls or results, or writes calls that the parser cannot read."""

    def read(text: str, closing: Closing) -> Reading:
        return parser.parse(said(text, opened, behaviour.tags, parser, closing), PROBE_TOOLS)

    def reads(text: str, closing: Closing, expected: list[Call]) -> bool:
        found = read(text, closing)
        return found.calls == expected and not found.content

    ignores = not shows_tools(opened)
    unseen = RenderError("the chat template ignores `tools`: the model would not know of them")
    messages, expected = probe_calls(parser, 1)
    try:
        text = fit_calls(template, parser, specs)
    except RenderError as error:
        fix = _use_another(template)
        named = RenderError(f"{error}; {fix}") if fix else error
        raise (unseen if ignores else named) from error
    words = behaviour.closings.words
    if all(read(text, end).calls != expected for end in (words, Closing(end=template.trailing_token(text)))):
        if ignores:
            raise unseen
        problem = f"a format that rollout.parser does not read: {text.rpartition('wordask')[2]!r}"
        fix = _use_another(template) or "no native format does"
        raise RenderError(f"the chat template writes tool calls in {problem}; {fix}")
    told = results_of(messages[1]["tool_calls"])
    try:
        after = template.render([*messages, *told], specs)
    except RenderError as error:
        raise RenderError(f"the chat template cannot render a tool message: {error}") from error
    if "wordresult0" not in after:
        raise RenderError("the chat template cannot render a tool message: it leaves them out")
    closing = closing_of_calls(template, text, after, words, lambda ending: reads(text, ending, expected))
    behaviour.closings = Closings(words, closing)
    behaviour.turns += text[turn_start(opened, text) :].removesuffix(closing.text)
    behaviour.whole_frame += after[len(text) :] if after.startswith(text) else ""
    behaviour.questions_after_results = shows(template, [*messages, *told, messages[0]], specs, "wordresult0")
    if template.write_calls is not None:
        behaviour.notes.append("leaves out tool calls: the content contains them, marked by the tokenizer's tokens")
    if ignores:
        behaviour.shows_tools = False
        behaviour.notes.append("ignores `tools`: the system message describes them")
    _probe_two_calls(template, behaviour, parser, specs, reads)
    if parser.write(expected[:1], PROBE_TOOLS) not in text:
        behaviour.notes.append("re-serialises tool calls: sampled ids are kept")
    spoken = said(text, opened, behaviour.tags, parser, closing)
    if shown := shown_otherwise(opened, spoken, expected[0][0]):
        behaviour.misprint = shown
        behaviour.notes.append(f"shows calls as {shown!r}, but writes them otherwise: models copy what they are shown")
    beside, _ = probe_calls(parser, 1, "wordbeside")
    try:
        found = read(template.render(beside, specs), closing)
        behaviour.words_with_calls = found.calls == expected and "wordbeside" in found.content
    except RenderError:
        behaviour.words_with_calls = False
    if not behaviour.words_with_calls:
        behaviour.notes.append("has no text beside a tool call")
    told = [QUESTION, ANSWER, {"role": "tool", "content": "wordthree"}]
    behaviour.complains_as_tool = (closing.opens_next or closing.end == words.end) and all(
        shows(template, conversation, specs, "wordthree") for conversation in (told, [*told, ANSWER])
    )
    if not behaviour.complains_as_tool:
        behaviour.notes.append("has no tool message without a call: a user message reports a malformed call")


def shown_otherwise(opened: str, turn: str, name: str) -> str | None:
    """Return the beginning of a call as the template's instructions show it, if it differs from that in `turn`."""
    begins = _OPENING_TAG.search(turn[: turn.find(name)])
    if begins is None:
        return None
    written = _compact(turn[begins.end() : turn.find(name)])
    shown = [opened[tag.end() :] for tag in re.finditer(re.escape(begins[0]), opened)]
    # prose follows a tag that is only named, and the closing tag one that is shown empty
    examples = [text for text in shown if _EXAMPLE.match(text)]
    if not examples or any(_compact(text[:200]).startswith(written) for text in examples):
        return None
    return begins[0] + examples[0][: len(written) + 12].rstrip()


def _compact(text: str) -> str:
    return re.sub(r"[\s\"']", "", text)


def shows_tools(text: str) -> bool:
    return all(spec.name in text for spec in PROBE_TOOLS)


def fit_tools(template: ChatTemplate, specs: Tools) -> bool:
    """Return whether a template that ignores `tools` reads them from the system message, and set its form."""
    template.tools_in_system = True
    template.tools_in_system = all(shows(template, [QUESTION], specs, spec.name) for spec in PROBE_TOOLS)
    return template.tools_in_system


def _probe_two_calls(
    template: ChatTemplate,
    behaviour: Behaviour,
    parser: Parser,
    specs: Tools,
    reads: Callable[[str, Closing, list[Call]], bool],
) -> None:
    """Probe whether a turn may have two calls. Raises RenderError if their results cannot be rendered."""
    messages, expected = probe_calls(parser, 2)
    problem = "writes only one tool call"
    try:
        behaviour.parallel_calls = reads(template.render(messages, specs), behaviour.closings.calls, expected)
    except RenderError:  # many say so: "This model only supports single tool-calls at once!"
        behaviour.parallel_calls, problem = False, "refuses two tool calls"
    if not behaviour.parallel_calls:
        behaviour.notes.append(f"{problem} in one turn: a turn with several is malformed")
        return
    try:
        after = template.render([*messages, *results_of(messages[1]["tool_calls"])], specs)
    except RenderError as error:
        raise RenderError(f"the chat template cannot render two tool messages in a row: {error}") from error
    if not all(f"wordresult{n}" in after for n in range(2)):
        raise RenderError("the chat template cannot render two tool messages in a row: it leaves them out")


def fit_calls(template: ChatTemplate, parser: Parser, specs: Tools) -> str:
    """Find the form of calls that the template accepts, and return a turn with one. Raises RenderError."""
    messages, expected = probe_calls(parser, 1)
    reason = None
    for as_text, null in product((False, True), (False, True)):
        template.arguments_as_text, template.null_content = as_text, null
        try:
            text = template.render(messages, specs)
        except RenderError as error:
            reason = reason or error
            continue
        # a template that writes calls as Python dicts, with single quotes, expects the arguments as JSON text; the
        # description of the tools, before the question, does not matter
        turn = text.rpartition("wordask")[2]
        if expected[0][0] in turn and "{'zeta'" not in turn:
            return text
        reason = reason or RenderError("it leaves them out")
    template.arguments_as_text = template.null_content = False
    added = {token.content for token in template.tokenizer.added_tokens_decoder.values()}
    if isinstance(parser, NativeParser) and parser.marks and added.issuperset(parser.marks):
        template.write_calls = lambda calls: parser.write_as_content([call_of(call) for call in calls], PROBE_TOOLS)
        return template.render(messages, specs)
    raise RenderError(f"the chat template cannot render a tool call: {reason}") from reason


def reads_call(template: ChatTemplate, parser: Parser) -> tuple[str, list[Call]] | None:
    """Return a turn with a call as the template writes it, and the call, if `parser` reads it; otherwise None."""
    specs: Tools = [spec.to_openai() for spec in PROBE_TOOLS]
    _, expected = probe_calls(parser, 1)
    try:
        opened = template.render([QUESTION], specs, prompt=True)
        words = closing_of_words(template, template.render([QUESTION, ANSWER], specs), specs)
        text = fit_calls(template, parser, specs)
    except RenderError:
        return None
    tags = reasoning_tags(find_reasoning(template, specs) or template.source)
    for closing in (words, Closing(end=template.trailing_token(text))):
        if parser.parse(said(text, opened, tags, parser, closing), PROBE_TOOLS).calls == expected:
            return text, expected
    return None


def _use_another(template: ChatTemplate) -> str:
    native = {name: parser for name in PARSERS if (parser := load_parser(name)).native}
    fit = [n for n, p in native.items() if reads_call(ChatTemplate(template.tokenizer, template.source), p)]
    return f"{USE}{' or '.join(fit)}" if fit else ""


def shows(template: ChatTemplate, messages: list[Message], specs: Tools, word: str) -> bool:
    try:
        return word in template.render(messages, specs, prompt=True)
    except RenderError:
        return False


def find_reasoning(template: ChatTemplate, specs: Tools) -> str | None:
    """Find the message field that the template renders as reasoning, and return a turn with it, if there is one."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        template.reasoning_field = name
        try:
            text = template.render([QUESTION, {**ANSWER, "reasoning_content": "wordreason"}], specs)
        except RenderError:
            continue
        if "wordreason" in text:
            return text
    template.reasoning_field = "reasoning_content"
    return None


def closing_of_words(template: ChatTemplate, closed: str, specs: Tools) -> Closing:
    """Return the closing of the text turn at the end of `closed`."""
    tail = closed.rpartition("wordanswer")[2]
    if tail:
        return template.closing_of(tail)
    # a token that is only written before the next message
    following = template.render([QUESTION, ANSWER, QUESTION], specs).rpartition("wordanswer")[2]
    rest = following.lstrip()
    token = template.leading_token(rest)
    return Closing(following.removesuffix(rest), token, opens_next=True) if token else Closing()


def closing_of_calls(
    template: ChatTemplate, text: str, after: str, words: Closing, reads: Callable[[Closing], bool]
) -> Closing:
    """Return the closing of the turn with a call at the end of `text`; `after` continues with its result."""
    if words.text and text.endswith(words.text):
        return words
    shorter = template.closing_of(words.after)  # Cohere's text has a closing token of its own
    if shorter.end and text.endswith(shorter.text) and reads(shorter):
        return shorter
    token = template.trailing_token(text)
    ending = Closing(end=token, after=text.rpartition(token)[2] if token else "")
    if token and reads(ending):
        return ending
    if after.startswith(text) and (token := template.leading_token(after[len(text) :])):
        closing = Closing(end=token, opens_next=True)
        if reads(closing):
            return closing
    if words.opens_next and reads(words):
        return words
    turn = text.rpartition("wordask")[2]
    how = "differently from a text turn" if template.trailing_token(text) else "without an end-of-turn token"
    raise RenderError(f"the chat template closes a turn with calls {how}: {turn!r}")


def turn_start(opened: str, *turns: str) -> int:
    """Return where the assistant's own text begins, given a generation prompt and texts with turns. If they differ
    within a tag, it begins with the tag: `<think>` and `<tool_call>` share two characters."""
    at = min(shared_length(opened, text) for text in turns)
    for text in (opened, *turns):
        for found in _TAG.finditer(text, max(0, at - 70), at + 70):
            if found.start() < at < found.end():
                at = found.start()
    return at


def said(text: str, opened: str, tags: tuple[str, str], parser: Parser, closing: Closing) -> str:
    """Return the text of the last turn after its reasoning, as `parser` gets it. `opened` ends with the prompt."""
    turn = text[turn_start(opened, text) :]
    turn = turn.removesuffix(closing.text) if closing.text else turn.rstrip()
    opens = opened.rstrip().endswith(tags[0].rstrip())
    within = opens and (text.startswith(opened) or turn.lstrip().startswith(tags[1]))
    return parser.split(turn, within, tags)[2]
