"""Converts text to token ids and back, so that text from people and tools can never become a control token.

A tokenizer reads `<|im_end|>` in a tool's result as the end of the turn, and what follows as other roles' turns. So a
mark is inserted into every such string before the chat template is rendered, and the rendered text is tokenised in the
pieces between the marks. No piece contains the string, so no id is the control token's, and the ids still spell the
same characters. Text without such a string is tokenised as usual.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.text.fast_encoding import FastEncoding

MARK = "\ufdd0"
"""A Unicode noncharacter, which never occurs in text meant for interchange."""
_UNFIT = re.compile(f"[{MARK}\ud800-\udfff]")
"""Characters that interchanged text must not contain and tokenizers refuse: surrogate halves and the mark itself."""


class Encoder:
    """A tokenizer with the token that ends a turn (empty: none), and the tokens with which a chat template frames
    turns: those in its rendered text `frame`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: str, frame: str) -> None:
        self.tokenizer = tokenizer
        # without the wrapper around it, which takes longer than the tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._fast = None
        if self._backend is not None:
            self._fast = FastEncoding(self._backend)
        self.end = end
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        # reasoning tags do not frame turns: prompts mention them
        framing = {end, tokenizer.eos_token} | {t for t in added if t in frame} - {"<think>", "</think>"}
        self._of_assistants = _pattern(framing)
        self._of_others = _pattern(framing | {token for token, special in added.items() if special})

    def mark(self, text: str, role: str = "user") -> str:
        """Insert a mark into every string in `text` that only the chat template may write: the tokens that frame turns
        and, unless an assistant wrote the text, all special tokens."""
        pattern = self._of_assistants if role == "assistant" else self._of_others
        return pattern.sub(lambda match: match[0] + MARK, _UNFIT.sub("\ufffd", text))

    def encode(self, text: str, follows: bool = False) -> list[int]:
        """Return the ids of a text with marks. `follows`: the text follows an end-of-turn token, or other text."""
        return [i for _, piece, later in _pieces(text, follows) for i in self._ids(piece, later)]

    def encode_with_offsets(self, text: str, follows: bool = False) -> tuple[list[int], list[int]]:
        """Return the same ids, and the position in the text at which each begins."""
        ids: list[int] = []
        starts: list[int] = []
        for position, piece, later in _pieces(text, follows):
            anchor = self.end if later else ""
            found = self.tokenizer(anchor + piece, add_special_tokens=False, return_offsets_mapping=True)
            skip = 1 if anchor else 0
            ids += found["input_ids"][skip:]
            starts += [position + start - len(anchor) for start, _ in found["offset_mapping"][skip:]]
        return ids, starts

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, with control tokens as their names."""
        text: Any
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=False)
        else:
            text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text` so that at most `max_tokens` tokens remain: head, a marker that says how much is
        missing, tail. None if the text fits. If not even the marker fits, return the beginning of the marker."""
        text = self.mark(text)
        # each token stands for at least one byte, and a normaliser turns a byte into at most three
        if 3 * len(text.encode()) <= max_tokens:
            return None
        total = len(self.encode(text))
        if total <= max_tokens:
            return None
        _, starts = self.encode_with_offsets(text)
        kept = max_tokens
        while True:
            marker = f"\n[... {total - kept} of {total} tokens left out ...]\n"
            head = starts[(kept + 1) // 2] if kept else 0
            tail = starts[total - kept // 2] if kept // 2 else len(text)
            short = text[:head] + marker + text[tail:]
            excess = len(self.encode(short)) - max_tokens
            if excess <= 0:
                return short.replace(MARK, "")
            if kept == 0:
                return self.decode(self.encode(marker.strip())[:max_tokens])
            kept = max(0, kept - excess)

    def _ids(self, piece: str, follows: bool) -> list[int]:
        # some tokenizers treat the beginning of a text differently: tokenise it behind an end-of-turn token
        anchor = self.end if follows else ""
        ids: list[int]
        if self._fast is None:
            ids = self.tokenizer(anchor + piece, add_special_tokens=False)["input_ids"]
        else:
            ids = self._fast.encode(anchor + piece)
        return ids[1:] if anchor else ids


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in a JSON value, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


def skip_marked(text: str, plain: str) -> str | None:
    """Return what follows `plain` in `text`, ignoring marks in `text`; None if `text` does not begin with it."""
    bare = text.replace(MARK, "")
    if not bare.startswith(plain):
        return None
    left = len(bare) - len(plain)
    at = len(text)
    while left:
        at -= 1
        left -= text[at] != MARK
    return text[at:]


def _pieces(text: str, follows: bool) -> Iterator[tuple[int, str, bool]]:
    """Yield (position, piece, whether it follows something) for the pieces between marks."""
    position = 0
    for number, piece in enumerate(text.split(MARK)):
        yield position, piece, follows or number > 0
        position += len(piece) + len(MARK)


def _pattern(tokens: set[Any]) -> re.Pattern[str]:
    """Match the first character of each of these strings, even if they overlap. A string of a single character cannot
    be split. Gemma has 6,000 special tokens: a plain alternation of all of them would be tried at every character."""
    strings = {token for token in tokens if token and len(token) > 1}
    return re.compile("|".join(f"{re.escape(c)}(?={_tree(rest)})" for c, rest in _by_first(strings)) or r"(?!)")


def _tree(strings: set[str]) -> str:
    """Return a pattern that matches the start of any of the strings."""
    if "" in strings:
        return ""
    return f"(?:{'|'.join(re.escape(c) + _tree(rest) for c, rest in _by_first(strings))})"


def _by_first(strings: set[str]) -> list[tuple[str, set[str]]]:
    """Map each first character to the rests of the strings."""
    return [(c, {s[1:] for s in strings if s[0] == c}) for c in sorted({s[0] for s in strings})]
