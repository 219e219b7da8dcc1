"""Harmony, the format of gpt-oss (PyPI `openai-harmony` and its documentation): a turn is several messages, each with a
channel. `analysis` is reasoning, `commentary` with a recipient is a call, `commentary` without one and `final` are
text. The recipient may be before the channel, as the chat template writes it, or after it, as models do."""

import json
import re
from collections.abc import Iterator, Sequence

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import read_object
from agentfactory.rollout.text.parsers.parser import Call, FormatError, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import skip_space

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARK = re.compile("|".join(map(re.escape, (START, *ENDS))))
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]*)")


class Harmony(NativeParser):
    """`<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "rain"}`, once, after text."""

    def split(self, text: str, opened: bool, tags: tuple[str, str]) -> tuple[str, str, str]:
        """The reasoning is in the analysis channel; `read` gets the whole text."""
        try:
            messages = list(_messages(text))
        except FormatError:
            return "", "", text
        thoughts = [body for channel, recipient, body in messages if channel == "analysis" and recipient is None]
        return "\n".join(thought.strip() for thought in thoughts), "", text

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        words: list[str] = []
        calls: list[Call] = []
        for channel, recipient, body in _messages(text):
            if recipient is not None:
                try:
                    if not (name := recipient.removeprefix("functions.")):
                        raise ValueError("no tool's name after functions.")
                    arguments, end = read_object(body, 0)
                    if skip_space(body, end) < len(body):
                        raise ValueError("text after the arguments")
                    calls.append((name, arguments))
                except ValueError as error:
                    raise FormatError(f"Malformed tool call {len(calls) + 1}: {error}") from error
            elif channel in ("final", "commentary"):
                words.append(body.strip())
            elif channel != "analysis":
                raise FormatError(f"There is no channel {channel!r}: use analysis, commentary or final")
        return Reading("\n".join(part for part in words if part), calls)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        written = [
            f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{json.dumps(given, ensure_ascii=False)}"
            for name, given in calls
        ]
        return f"<|call|>{START}assistant".join(written)

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return (
            f"Write a call as {CHANNEL}commentary to=functions.tool_name {CONSTRAIN}json{MESSAGE}{{...}}, "
            f"and an answer as {CHANNEL}final{MESSAGE}"
        )


def _messages(text: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield channel, recipient and body of the messages of a turn. Raises FormatError."""
    position = 0
    while position == 0 or position < len(text):
        at = text.find(MESSAGE, position)
        header = text[position:at] if at >= 0 else ""
        channel = _CHANNEL.search(header)
        if at < 0 or channel is None or _MARK.search(header):
            raise FormatError(f"A message begins with {CHANNEL}, a channel and {MESSAGE}")
        recipient = _RECIPIENT.search(header)
        start = at + len(MESSAGE)
        mark = _MARK.search(text, start)
        end = len(text) if mark is None else mark.start()
        yield channel[1], None if recipient is None else recipient[1], text[start:end]
        if mark is None:
            return
        position = mark.end()
        if mark[0] == START:
            raise FormatError(f"A message is not ended before {START}")
        if position < len(text):
            if not text.startswith(f"{START}assistant", position):
                raise FormatError(f"After a message, write {START}assistant or end the turn")
            position += len(f"{START}assistant")
