"""fastokens gives the same ids as tokenizers, or is not used."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import fastokens
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentfactory.rollout.text.encoding import FastEncoding

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CORPUS = [
    "the quick brown fox isn't where it's been; 12345 dogs",
    "Größe, naïve, Ελληνικά, 中文字符 and 日本語\n\n\tcode = {'a': [1, 2.5]}  \r\n",
] * 50


def byte_level(pattern: str | None, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE; `pattern`: None for GPT-2's own."""
    bpe = Tokenizer(models.BPE())
    if normalizer is not None:
        bpe.normalizer = normalizer
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False))
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bpe.add_tokens(["<think>", "</think>", "<tool_call>"])
    return bpe


TOKENIZERS = {"gpt-2": byte_level(None), "qwen": byte_level(QWEN, normalizers.NFC()), "llama 3": byte_level(LLAMA)}
FAST = {name: FastEncoding(tokenizer) for name, tokenizer in TOKENIZERS.items()}
ODD = ("\r\n ", "'S", "123456", "e\u0301")
PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from([*("<|im_start|>", "<|im_end|>", "<think>", "<tool_call>", "<|im_", "  ", "\n\n"), *ODD]),
    st.text(alphabet="ab \n\t'.1é中🙂", max_size=30),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@given(st.lists(PIECES, max_size=10).map("".join))
@example("x" * 3000)
@example(" " * 3000)
def test_ids_are_those_of_tokenizers(name: str, text: str) -> None:
    assert FAST[name].fast
    text = text.encode(errors="replace").decode()
    assert FAST[name].encode(text) == TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    assert FAST[name].fast


def other_ids(tokenizer: Tokenizer) -> Any:
    """fastokens with another vocabulary: two letters have changed places."""
    saved = json.loads(tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    vocabulary["z"], vocabulary["Q"] = vocabulary["Q"], vocabulary["z"]
    return fastokens.Tokenizer.from_json_str(json.dumps(saved))


def test_other_ids_are_found_at_the_load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = TOKENIZERS["qwen"]
    different = other_ids(tokenizer)
    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=lambda _: different))
    with caplog.at_level(logging.INFO, "agentfactory.rollout.text.encoding"):
        encoding = FastEncoding(tokenizer)
    assert not encoding.fast
    assert "gives other ids for" in caplog.text


def test_other_ids_are_found_later_and_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = TOKENIZERS["qwen"]
    encoding = FastEncoding(tokenizer)
    monkeypatch.setattr("agentfactory.rollout.text.encoding.COMPARED", 5)
    monkeypatch.setattr(encoding, "fast", other_ids(tokenizer))
    expected = tokenizer.encode("zQ").ids
    found = [encoding.encode("zQ") for _ in range(7)]
    assert [ids == expected for ids in found] == [False] * 4 + [True] * 3
    assert not encoding.fast
    assert "from now on, tokenizers encodes" in caplog.text
