"""Pythonic calls, `[search(query="rain", limit=3), look()]`, whose values are Python literals or JSON.

LFM2 and Llama 4 write them between tags, with other text allowed outside; Llama 3.2 writes the bare list as the whole
turn. LFM2 can also write the list as JSON. Python's own parser can exhaust time and stack on model output."""

import re
from collections.abc import Sequence
from typing import Any

from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.text.parsers.blocks import expect, read_blocks, read_call_object
from agentfactory.rollout.text.parsers.parser import Arguments, Call, FormatError, NativeParser, Reading
from agentfactory.rollout.text.parsers.values import MAX_DEPTH, read_json, read_number, skip_space

TAGS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
_NAME = r"[A-Za-z_][\w./-]*"
_JSON = re.compile(r"\s*\[\s*\{")
_BEGINS = re.compile(rf"\[\s*{_NAME}\s*\(")
_TOKEN = re.compile(
    r"(?P<string>[rR]?(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'))"
    r"|(?P<number>[-+]?\.?\d(?:[eE][-+]|[\w.])*)"
    rf"|(?P<name>{_NAME})|(?P<mark>[][(){{}},:=])",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:\n|([\\'\"abfnrtv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))")
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


class Pythonic(NativeParser):
    """`[search(query="rain")]` as the whole turn, or between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    marks = TAGS[0]

    def write_as_content(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return f"{TAGS[0][0]}{self.write(calls, specs)}{TAGS[0][1]}"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        tags = next((tags for tags in TAGS if tags[0] in text or tags[1] in text), None)
        if tags is None:
            words = text.strip()
            if not _BEGINS.match(words):
                return Reading(words)
            try:
                calls, end = _Reader(words, 0).calls()
            except ValueError as error:
                raise FormatError(f"Malformed tool call 1: {error}") from error
            if end < len(words):
                raise FormatError("Malformed tool call: a turn with a call has nothing beside it")
            return Reading("", calls)
        opening, closing = tags

        def read_list(position: int) -> tuple[list[Call], int]:
            if _JSON.match(text, position):
                value, end = read_json(text, skip_space(text, position))
                calls = [read_call_object(call, "arguments") for call in value]
            else:
                calls, end = _Reader(text, position).calls()
            return calls, expect(text, end, closing, "the list of calls")

        return read_blocks(text, opening, closing, read_list)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        for name in [name for name, _ in calls] + [key for _, arguments in calls for key in arguments]:
            if not re.fullmatch(_NAME, name):
                raise ValueError(f"{name!r} cannot be the name of a function or an argument")
        written = [f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
        return f"[{', '.join(written)}]"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return 'Write calls as a list, [tool_name(argument="value", other=1)]'


class _Reader:
    """A parser of one list of calls, starting at `position`. Raises ValueError."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.end = position
        self.advance()

    def advance(self) -> None:
        """Move to the next token. `kind` is string, number, name, the mark itself, or empty if nothing matches."""
        self.start = skip_space(self.text, self.end)
        found = _TOKEN.match(self.text, self.start)
        self.token = found[0] if found else ""
        kind = found.lastgroup if found else None
        self.kind = self.token if kind == "mark" else kind or ""
        self.end = self.start + len(self.token)

    def take(self, kind: str) -> str:
        """Return the current token, which must be of `kind`, and move to the next."""
        token = self.token
        if self.kind != kind:
            found = repr(self.text[self.start : self.start + 20]) if self.start < len(self.text) else "the end"
            what = f"a {kind}" if kind.isalpha() else repr(kind)
            raise ValueError(f"expected {what} at {found}")
        self.advance()
        return token

    def calls(self) -> tuple[list[Call], int]:
        """Return the calls, and the end position of the list."""
        self.take("[")
        calls: list[Call] = []
        while self.kind != "]" or not calls:
            calls.append(self.call())
            self.separate("]")
        return calls, self.end

    def call(self) -> Call:
        name = self.take("name")
        self.take("(")
        arguments: Arguments = {}
        while self.kind != ")":
            if self.kind != "name":
                raise ValueError(f"each argument of {name} has to be given as name=value")
            key = self.take("name")
            if key in arguments:
                raise ValueError(f"the argument {key} of {name} is given twice")
            self.take("=")
            arguments[key] = self.value(0)
            self.separate(")")
        self.advance()
        return name, arguments

    def separate(self, closing: str) -> None:
        """Take the comma between two items, or after the last one before `closing`."""
        if self.kind != closing:
            self.take(",")

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        kind, token = self.kind, self.token
        if kind not in (*_BRACKETS, "number") and not (kind == "name" and token in _CONSTANTS):
            return _unquote(self.take("string"))
        self.advance()
        if kind == "number":
            return read_number(token, " is no number, or too large")
        if kind == "name":
            return _CONSTANTS[token]
        items: list[Any] = []
        named: dict[str, Any] = {}
        closing = _BRACKETS[kind]
        while self.kind != closing:
            if kind == "{":
                key = _unquote(self.take("string"))
                self.take(":")
                named[key] = self.value(depth + 1)
            else:
                items.append(self.value(depth + 1))
            self.separate(closing)
        self.advance()
        return named if kind == "{" else items


def _unquote(token: str) -> str:
    raw = token[0] in "rR"
    token = token[1:] if raw else token
    quotes = 3 if len(token) >= 6 and token[:3] in ('"""', "'''") else 1
    text = token[quotes:-quotes]
    try:
        if not raw and "\\" in text:
            text = _ESCAPE.sub(_unescape, text)
        # two surrogate halves form one character
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except (ValueError, OverflowError) as error:
        raise ValueError("a string has an escape that is no character") from error


def _unescape(match: re.Match[str]) -> str:
    simple, x, u, long, octal = match.groups()
    if simple:
        return _ESCAPED.get(simple, simple)
    if octal:
        return chr(int(octal, 8))
    code = x or u or long
    return chr(int(code, 16)) if code else ""
