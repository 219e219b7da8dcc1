"""Frames around judged text, which is hostile, and verdicts that only the judge can have written.

A frame ends with a line that begins with `>>>`, and each line of its text begins with `| `, so no text can end its
frame. Frame and verdict carry a nonce, drawn for each request, which the author of the text cannot know."""

import json
import re
import secrets
import unicodedata
from typing import Any

from agentfactory.people.judges.client import VerdictError

MOST_CHARACTERS = 40_000
"""Characters of a text that are shown; of a longer one, the beginning and the end."""
_MOST_OBJECTS = 20  # that are read, the last ones of an answer, which may be a flood
_TEMPLATE_TOKENS = re.compile(
    r"<(?=[|｜][^<>\n]{0,60}[|｜]>|/?s>|<?/?SYS>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>|/?think>)|\[(?=/?INST\])"
)
"""Beginnings of tokens that end a message in some chat templates, wherever they stand."""
_BARE = re.compile(r"(:\s*)(yes|no)(?=\s*[,}])", re.IGNORECASE)
"""Words that small models write without quotation marks."""
_INVISIBLE = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories that are written as escapes: controls, changes of direction, and lines' ends."""


def draw_nonce() -> str:
    """Return 64 random bits in hexadecimal digits."""
    return secrets.token_hex(8)


def frame(name: str, text: str, nonce: str) -> str:
    """Return `text` in a frame of its own."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out here]\n{text[-half:]}"
    # splitlines knows every kind of line's end
    lines = (f"| {_visible(line)}" for line in text.splitlines() or [""])
    return "\n".join([f"<<< {name} {nonce}", *lines, f">>> {name} {nonce}"])


def _visible(line: str) -> str:
    shown = _TEMPLATE_TOKENS.sub(lambda found: f"{found[0]}\\", line)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(
        char.encode("unicode_escape").decode() if char != "\t" and unicodedata.category(char) in _INVISIBLE else char
        for char in shown
    )


def read_verdict(answer: str, nonce: str) -> Any:
    """Return the value in the JSON object `{"<nonce>": value}` of a judge's answer, outside its reasoning. Raise
    VerdictError if there is none, or if several differ. Text that the judge repeats cannot have the nonce."""
    said = answer.rpartition("</think>")[2]
    found: list[Any] = []
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    for match in [*re.finditer(rf'\{{\s*"{re.escape(nonce)}"\s*:', said)][-_MOST_OBJECTS:]:
        rest = said[match.start() : match.start() + MOST_CHARACTERS]
        try:
            value = decoder.raw_decode(rest)[0]
        except (ValueError, RecursionError):
            try:
                value = decoder.raw_decode(_BARE.sub(r'\1"\2"', rest))[0]
            except (ValueError, RecursionError):
                continue  # the form of the verdict, repeated
        if value[nonce] not in found:
            found.append(value[nonce])
    if len(found) != 1:
        what = "several different verdicts" if found else "no verdict in the form that was asked for"
        raise VerdictError(f"{what} in the judge's answer {answer[-300:]!r}")
    return found[0]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
