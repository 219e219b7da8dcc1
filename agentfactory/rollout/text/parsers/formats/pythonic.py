"""Pythonic calls: `[search(query="rain", limit=3), look()]`.

LFM2 and Llama 4 write them between tags, with other text allowed outside; Llama 3.2 writes the bare list as the whole
turn. LFM2 can also write the list as JSON. Values are Python literals or JSON. A small parser reads them in linear
time, because Python's own parser can exhaust time and stack on model output.
"""

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
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


class Pythonic(NativeParser):
    """`[search(query="rain")]`, or the same between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    marks = TAGS[0]

    def write_as_content(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return f"{TAGS[0][0]}{self.write(calls, specs)}{TAGS[0][1]}"

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """A bare list counts as calls only if it is the whole turn."""
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
        """Writes a bare list."""
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
            if self.kind != "]":
                self.take(",")
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
            if self.kind != ")":
                self.take(",")
        self.advance()
        return name, arguments

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        token = self.token
        if self.kind == "{":
            return self.mapping(depth)
        if self.kind in ("[", "("):
            self.advance()
            items = []
            closing = "]" if token == "[" else ")"
            while self.kind != closing:
                items.append(self.value(depth + 1))
                if self.kind != closing:
                    self.take(",")
            self.advance()
            return items
        if self.kind == "name" and token in _CONSTANTS:
            self.advance()
            return _CONSTANTS[token]
        if self.kind == "number":
            self.advance()
            return read_number(token, " is no number, or too large")
        return _unquote(self.take("string"))

    def mapping(self, depth: int) -> dict[str, Any]:
        self.advance()
        items = {}
        while self.kind != "}":
            key = _unquote(self.take("string"))
            self.take(":")
            items[key] = self.value(depth + 1)
            if self.kind != "}":
                self.take(",")
        self.advance()
        return items


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
