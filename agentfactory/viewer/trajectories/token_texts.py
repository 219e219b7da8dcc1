"""Texts of token ids, from the run's own tokenizer and without torch."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentfactory.base.files.untrusted_files import open_file, read_json
from agentfactory.viewer.runs.run_data import Run

_FILE = "tokenizer.json"
_BYTES = 256 << 20
_INCOMPLETE = "\ufffd"
_LONGEST = 8
"""Maximum number of tokens that one character may be spread over."""
_LONGEST_TEXT = 4096
_DECODERS = {"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder", "CTC"}
"""Decoders whose output is not longer than the texts of the tokens."""
_ONLY_TO_ENCODE = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
"""Parts of a tokenizer that decoding does not need, and that can exhaust memory if a file is damaged."""


class TokenTexts:
    """The text of each token in its context. Of tokens that share a character, the first one has it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # some decoders drop a leading space, but not after another token
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._before = len(self._decode(self._anchor))
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return one text per id; `<id>` for an unknown one. Raises ValueError if the library panics."""
        with _named_panics():
            return self._texts(ids)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        new = [token for token in dict.fromkeys(ids) if token not in self._known]
        for token in new:
            known = self._tokenizer.id_to_token(token) is not None
            self._known[token] = self._decode([*self._anchor, token])[self._before :] if known else f"<{token}>"
        texts = [self._known[token] for token in ids]
        place = 0
        while place < len(ids):
            place += self._join(ids, texts, place) if _INCOMPLETE in texts[place] else 1
        return texts

    def _join(self, ids: Sequence[int], texts: list[str], start: int) -> int:
        """Give the token at `start` the character that begins there; return the number of tokens used."""
        for end in range(start + 2, min(start + _LONGEST, len(ids)) + 1):
            whole = self._decode([*self._anchor, *ids[start:end]])[self._before :]
            if _INCOMPLETE not in whole:
                texts[start:end] = [whole, *[""] * (end - start - 1)]
                return end - start
        return 1

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def token_texts(run: Run) -> TokenTexts | None:
    """Load the tokenizer of the run's last checkpoint, or of its model if it is on this machine; None if neither."""
    try:
        found = _find(run)
        return None if found is None else _load(*found)
    except (OSError, ValueError) as error:
        run.note_unreadable(error)
        return None


def _find(run: Run) -> tuple[Path, Path | None, tuple[int, ...]] | None:
    """Return the file, the folder below which it has no links, and values that change with its content."""
    checkpoints = run.saved_checkpoints()
    places: list[tuple[Path, Path | None]] = [(checkpoints[-1] / _FILE, run.folder.within)] if checkpoints else []
    if (of_model := run.model_file(_FILE)) is not None:
        places.append(of_model)
    for path, within in places:
        try:
            with open_file(path, within) as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            continue
        return path, within, (status.st_ino, status.st_size, status.st_mtime_ns)
    return None


@lru_cache(maxsize=4)
def _load(path: Path, within: Path | None, changed: tuple[int, ...]) -> TokenTexts:
    try:
        saved: dict[str, Any] = read_json(path, within, _BYTES)
        _check_decoder(saved.get("decoder"))
        model: Any = saved.get("model")
        texts = [*model["vocab"], *(token["content"] for token in saved.get("added_tokens") or ())]
        # Unigram has pairs of a text and a score
        if max((len(text if isinstance(text, str) else text[0]) for text in texts), default=0) > _LONGEST_TEXT:
            raise ValueError(f"it has a token of more than {_LONGEST_TEXT:,} characters")
        with _named_panics():
            return TokenTexts(Tokenizer.from_str(json.dumps({**saved, **dict.fromkeys(_ONLY_TO_ENCODE)})))
    except OSError:
        raise
    except Exception as error:  # boundary: the library raises Exception itself
        raise ValueError(f"{path.name} is not a tokenizer: {error}".replace(f"{path.parent}/", "")) from None


def _check_decoder(decoder: Any) -> None:
    """Raise ValueError for a decoder whose output could be much longer than the texts of the tokens."""
    if decoder is None:
        return
    kind = decoder["type"]
    if kind == "Sequence":
        for each in decoder["decoders"]:
            _check_decoder(each)
    elif kind == "Replace":
        pattern = decoder["pattern"].get("String", "")
        if not pattern or len(decoder["content"]) > len(pattern):
            raise ValueError("its decoder replaces texts by longer ones, or by a regular expression")
    elif kind not in _DECODERS and not (kind == "Strip" and decoder["content"] == " "):
        raise ValueError(f"its decoder is {kind}")


@contextmanager
def _named_panics() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library panicked: {error}") from None
