"""Conversion of text to token ids and back, in which text from users and tools can never become a control token. A
tokenizer would read `<|im_end|>` in a tool result as the end of the turn. So a mark is inserted into every such string
before the chat template is rendered, and the rendered text is tokenised in pieces between the marks. No piece contains
the string, so no id is the control token's, and the ids still decode to the same characters."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import fastokens
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.text.tokenizer import decoder

MARK = "\ufdd0"
"""A Unicode noncharacter, which never occurs in text meant for interchange."""
_UNFIT = re.compile(f"[{MARK}\ud800-\udfff]")
"""Characters that interchanged text must not contain and tokenizers refuse: surrogate halves and the mark itself."""


class Encoder:
    """A tokenizer with a template's end-of-turn token `end` (empty: none) and the tokens of `frame` around turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: str, frame: str) -> None:
        self.tokenizer = tokenizer
        self.decode = decoder(tokenizer)
        self._fast = FastEncoding(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        self.end = end
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        # reasoning tags do not frame turns, and prompts may mention them
        framing = {end, tokenizer.eos_token} | {t for t in added if t in frame} - {"<think>", "</think>"}
        self._of_assistants = _pattern(framing)
        self._of_others = _pattern(framing | {token for token, special in added.items() if special})

    def mark(self, text: str, role: str = "user") -> str:
        """Mark every string that only the template may write: tokens that frame turns, and special tokens of others."""
        pattern = self._of_assistants if role == "assistant" else self._of_others
        return pattern.sub(lambda match: match[0] + MARK, _UNFIT.sub("\ufffd", text))

    def encode(self, text: str, follows: bool = False) -> list[int]:
        """Return the ids of a text with marks. `follows`: an end-of-turn token or other text precedes it."""
        return [i for _, piece, later in _pieces(text, follows) for i in self._ids(piece, later)]

    def encode_with_offsets(self, text: str, follows: bool = False) -> tuple[list[int], list[int]]:
        """Return the same ids, and the position in the text where each begins."""
        ids: list[int] = []
        starts: list[int] = []
        for position, piece, later in _pieces(text, follows):
            anchor = self.end if later else ""
            found = self.tokenizer(anchor + piece, add_special_tokens=False, return_offsets_mapping=True)
            skip = 1 if anchor else 0
            ids += found["input_ids"][skip:]
            starts += [position + start - len(anchor) for start, _ in found["offset_mapping"][skip:]]
        return ids, starts

    def cut(self, text: str, max_tokens: int) -> str | None:
        """Cut the middle of `text` so that at most `max_tokens` tokens remain: head, a marker with the number of
        removed tokens, tail. None if the text fits. If not even the marker fits, return the beginning of the marker."""
        text = self.mark(text)
        # each token stands for at least one byte, and a normaliser expands a byte to at most three
        if 3 * len(text.encode()) <= max_tokens or (total := len(self.encode(text))) <= max_tokens:
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
        # some tokenizers treat the start of a text differently, so tokenise it after an end-of-turn token
        text = self.end + piece if follows else piece
        if self._fast is not None:
            ids = self._fast.encode(text)
        else:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[1:] if follows and self.end else ids


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
    """Return the rest of `text` after the prefix `plain`, ignoring marks; None if `text` does not begin with it."""
    bare = text.replace(MARK, "")
    if not bare.startswith(plain):
        return None
    left, at = len(bare) - len(plain), len(text)
    while left:
        at -= 1
        left -= text[at] != MARK
    return text[at:]


def _pieces(text: str, follows: bool) -> Iterator[tuple[int, str, bool]]:
    position = 0
    for number, piece in enumerate(text.split(MARK)):
        yield position, piece, follows or number > 0
        position += len(piece) + len(MARK)


def _pattern(tokens: set[Any]) -> re.Pattern[str]:
    """Return a pattern for the first character of each of these strings, even if they overlap, without those of one
    character. It is a tree, because Gemma has 6,000 special tokens."""
    strings = {token for token in tokens if token and len(token) > 1}
    return re.compile("|".join(f"{re.escape(c)}(?={_tree(rest)})" for c, rest in _by_first(strings)) or r"(?!)")


def _tree(strings: set[str]) -> str:
    if "" in strings:
        return ""
    return f"(?:{'|'.join(re.escape(c) + _tree(rest) for c, rest in _by_first(strings))})"


def _by_first(strings: set[str]) -> list[tuple[str, set[str]]]:
    return [(c, {s[1:] for s in strings if s[0] == c}) for c in sorted({s[0] for s in strings})]


_log = logging.getLogger(__name__)

COMPARED = 1000
"""Interval, in texts, at which both tokenizers encode a text for comparison."""
_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's what they'd've said: we'll see, WE'LL SEE, I'm he's.",
    "  leading and trailing  \n\n\n\tindented\r\n  lines \n \n",
    "0 12 345 6789 1234567890 3.14159 -1e-9 0xFFEE 1,000,000 ²³ ½ Ⅷ ٣٤٥",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n\n\nclass A(B): ...\n\tif a!=b&&c||d: {a;b;}',
    '{"name": "read", "arguments": {"page": 7, "filter": [null, true, "a\\n\\u00e9"]}}',
    "<tool_response>\n[1] http://example.org/a?b=c&d=%20e#f (x@y.zz) ~/a/../b $HOME `rm -rf` | && ;; ---- ==== ....",
    "Ünïcödé naïve façade ŒUVRE straße ΑΒΓ абв אבג عربي हिन्दी ไทย 中文字符,日本語のテキスト。 한국어 문장",
    "e\u0301 \u1e9b\u0323 ﬁ Å \u212b \u00a0\u2009\u3000\u200b\u200d\ufeff\u00ad\u2028\u2029 \u0000\u0007\u007f",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 🇩🇪🇯🇵 \U0010ffff \ufffd",
    "a" * 300 + " " * 300 + "\n" * 50 + "=" * 100 + "ab" * 100,
    "",
    " ",
    "\n",
)


class FastEncoding:
    """An encoder by `fastokens`, without surrounding special tokens, in a few hundredths of the time of `tokenizers`.
    Its ids are compared with those of `tokenizers` for texts of all kinds when a tokenizer is loaded, and then for
    every thousandth text. After a difference, or for tokenizers with unsupported parts (Unigram, WordPiece, some
    normalizers), `tokenizers` encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.fast = self._agreeing()
        """None if the tokenizer itself encodes."""
        self._encoded = 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Control tokens in it are recognised as by `tokenizers`."""
        if self.fast is None:
            return self._slowly(text)
        self._encoded += 1
        try:
            ids: list[int] = self.fast.encode(text, add_special_tokens=False).ids
        except ValueError as error:
            # a regular expression of the tokenizer exceeded its limits on this text
            _log.debug("fastokens: %s", error)
            return self._slowly(text)
        if self._encoded % COMPARED == 0 and (expected := self._slowly(text)) != ids:
            at = next((k for k, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), 0)
            told = "fastokens gives other ids (%s) than tokenizers (%s); from now on, tokenizers encodes"
            _log.warning(told, ids[at : at + 8], expected[at : at + 8])
            self.fast = None
            return expected
        return ids

    def _slowly(self, text: str) -> list[int]:
        # without offsets, which take half of the time
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _agreeing(self) -> "fastokens.Tokenizer | None":
        """Load the tokenizer into `fastokens`; None if that fails or the ids differ."""
        try:
            fast = fastokens.Tokenizer.from_json_str(self._tokenizer.to_str())
            added = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]
            # after text, spaces and each other, because added tokens may absorb spaces or match only whole words
            tokens = [f"{a} {b}{a}x{b}\n" for a, b in zip(added, reversed(added), strict=True)]
            for text in (*_TEXTS, *tokens, "\n".join(_TEXTS)):
                ids, expected = fast.encode(text, add_special_tokens=False).ids, self._slowly(text)
                if ids != expected:
                    _log.info("tokenizers encodes, because fastokens gives other ids for %r", text[:80])
                    return None
        except ValueError as error:
            _log.info("tokenizers encodes, because fastokens does not support this tokenizer: %s", error)
            return None
        return fast
