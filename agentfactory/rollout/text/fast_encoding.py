"""Encodes text by `fastokens`, in a few hundredths of the time of `tokenizers`, where both give the same ids.

A worker encodes the answer of every tool before it asks for the next turn, so this is most of what a turn costs it.
`fastokens` reads the same `tokenizer.json`. It is trusted only as far as it was compared: with texts of all kinds when
a tokenizer is loaded, and with every thousandth text from then on. Where it differs or does not know the tokenizer's
parts (Unigram, WordPiece, some normalizers), `tokenizers` encodes.
"""

import logging

import fastokens
from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

COMPARED = 1000
"""Every so many texts one is encoded by both."""
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
    """The ids of texts, without special tokens around them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast = self._agreeing()
        self._encoded = 0

    @property
    def fast(self) -> bool:
        """Whether `fastokens` encodes."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Control tokens in it are found as `tokenizers` finds them."""
        if self._fast is None:
            return self._slowly(text)
        self._encoded += 1
        try:
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        except ValueError as error:
            # an expression of the tokenizer went beyond its limits on this text
            _log.debug("fastokens: %s", error)
            return self._slowly(text)
        if self._encoded % COMPARED == 0 and (expected := self._slowly(text)) != ids:
            _log.warning(
                "fastokens gives other ids than tokenizers for %r; from now on, tokenizers encodes",
                _around(ids, expected),
            )
            self._fast = None
            return expected
        return ids

    def _slowly(self, text: str) -> list[int]:
        # without offsets: half of the time
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _agreeing(self) -> "fastokens.Tokenizer | None":
        """Load the tokenizer into `fastokens`; None if it cannot, or gives other ids."""
        try:
            fast = fastokens.Tokenizer.from_json_str(self._tokenizer.to_str())
            added = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]
            # behind text, spaces and each other: added tokens can take spaces, or stand for whole words only
            texts = [
                *_TEXTS,
                *(f"{a} {b}{a}x{b}\n" for a, b in zip(added, reversed(added), strict=True)),
                "\n".join(_TEXTS),
            ]
            for text in texts:
                ids, expected = fast.encode(text, add_special_tokens=False).ids, self._slowly(text)
                if ids != expected:
                    _log.info("tokenizers encodes, because fastokens gives other ids for %r", text[:80])
                    return None
        except ValueError as error:
            _log.info("tokenizers encodes, because fastokens does not know this tokenizer: %s", error)
            return None
        return fast


def _around(ids: list[int], expected: list[int]) -> tuple[list[int], list[int]]:
    """Return a few ids of each from where they begin to differ."""
    at = next((k for k, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    return ids[at : at + 8], expected[at : at + 8]
