"""The role of each token of a turn: text, argument values, or the tool-call format."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

FORMAT, ARGUMENTS, TEXT = ord("f"), ord("a"), ord("t")
ROLES = {"format": chr(FORMAT), "arguments": chr(ARGUMENTS), "text": chr(TEXT)}
"""Role names in metrics -> letters, one per token: see `turn_roles`."""

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_length(tokenizer: PreTrainedTokenizerBase, token: int) -> int:
    raw: Any = tokenizer.convert_ids_to_tokens(token)
    if raw is not None and "\u2581" in raw:
        # decoded alone, the token would lose its leading space
        return len(raw.replace("\u2581", " ").encode())
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if "\ufffd" in text and raw is not None:
        # part of a character: byte-level vocabularies represent a byte by one character
        return 1 if _BYTE.fullmatch(raw) else len(raw)
    return len(text.encode())


def turn_roles(
    lengths: Sequence[int], text: str, words: Iterable[str], arguments: Iterable[dict[str, Any]], malformed: bool
) -> str:
    """Return a letter for each token of a turn. The tokens' `lengths` in bytes add up to those of `text` and its end.
    arguments: the token contains part of an argument value of a call; text: otherwise, part of the `words` outside
    calls; format: all others, and all of a `malformed` turn. Words are searched from the start and values from the end,
    where the calls are. Text that differs from its parsed form, such as by an escape, may be missed: it is format."""
    whole = text.encode()
    letters = bytearray([FORMAT]) * (sum(lengths) + len(whole))
    if not malformed:
        start, end = 0, len(whole)
        for line in (line.strip().encode() for part in words for line in part.splitlines()):
            if line and (found := whole.find(line, start)) >= 0:
                start = found + len(line)
                letters[found:start] = bytes([TEXT]) * len(line)
        for value in reversed([value.encode() for values in arguments for value in _written(values)]):
            if value and (found := whole.rfind(value, 0, end)) >= 0:
                end = found
                letters[found : found + len(value)] = bytes([ARGUMENTS]) * len(value)
    roles, start = bytearray(), 0
    for length in lengths:
        held = letters[start : start + length]
        roles.append(ARGUMENTS if ARGUMENTS in held else TEXT if TEXT in held else FORMAT)
        start += length
    return roles.decode()


def _written(value: Any) -> Iterable[str]:
    """Yield the leaves of a value in their most likely written form."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _written(inner)
    elif isinstance(value, str):
        written = json.dumps(value, ensure_ascii=False)[1:-1]
        yield from (written.split("\\n") if "\n" in value else [written])
    else:
        yield json.dumps(value)
