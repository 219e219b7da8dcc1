"""The parts of an assistant's turn in a rendered conversation: its start, its reasoning and its closing."""

import re
from collections.abc import Callable

from agentfactory.base.messages import Message
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.templates import ChatTemplate, Closing, RenderError, Tools, shared_length

_TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\]")


def shows(template: ChatTemplate, messages: list[Message], specs: Tools, word: str) -> bool:
    try:
        return word in template.render(messages, specs, prompt=True)
    except RenderError:
        return False


def find_reasoning(template: ChatTemplate, messages: list[Message], specs: Tools) -> str | None:
    """Find the message field from which the template renders reasoning, and return a turn with reasoning; None if there
    is none."""
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


def closing_of_words(template: ChatTemplate, closed: str, specs: Tools) -> Closing:
    """Return the closing of the text turn at the end of `closed`."""
    tail = closed.rpartition("wordanswer")[2]
    if tail:
        return template.closing_of(tail)
    question: Message = {"role": "user", "content": "wordask"}
    answer: Message = {"role": "assistant", "content": "wordanswer"}
    following = template.render([question, answer, question], specs)
    return _opening_of_next(template, following.rpartition("wordanswer")[2])


def _opening_of_next(template: ChatTemplate, following: str) -> Closing:
    """Return the closing of turns that end with a token which is only written before the next message."""
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
        window = max(0, at - 70)
        for found in _TAG.finditer(text, window, at + 70):
            if found.start() < at < found.end():
                at = found.start()
    return at


def said(text: str, opened: str, tags: tuple[str, str], parser: Parser, closing: Closing) -> str:
    """Return the text after the reasoning of the turn at the end of `text`, as `parser` gets it. `opened` is the
    conversation before the turn, with the generation prompt."""
    turn = text[turn_start(opened, text) :].rstrip() if not closing.text else text[turn_start(opened, text) :]
    turn = turn.removesuffix(closing.text)
    opens = opened.rstrip().endswith(tags[0].rstrip())
    within = opens and (text.startswith(opened) or turn.lstrip().startswith(tags[1]))
    return parser.split(turn, within, tags)[2]
