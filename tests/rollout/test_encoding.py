"""User and tool content never becomes a control token; everything else is tokenised as usual."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentfactory.rollout.text.encoding import MARK, Encoder, map_strings, skip_marked
from tests.chat_tokenizers import make_tokenizer

LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|finetune|>")


def with_spaces() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: it prepends a space to a text, and spaces are visible characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(["the user asks. an assistant calls a tool </s> <|user|>"] * 20, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # bytes are tokens, but no special ones
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(saved)), eos_token="</s>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    return fast


ENCODERS = {
    "qwen": Encoder(make_tokenizer(), "<|im_end|>", "<|im_start|>user\n<|im_end|>\n<think>"),
    "qwen, tags special": Encoder(
        make_tokenizer(special=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), added=("<think>",)),
        "<|im_end|>",
        "<|im_start|>user\n<|im_end|>\n",
    ),
    "llama": Encoder(make_tokenizer(special=LLAMA, eos="<|eot_id|>"), "<|eot_id|>", "<|start_header_id|>"),
    "no end": Encoder(make_tokenizer(splits=False), "", "user: "),
    "not special": Encoder(
        make_tokenizer(special=("<s>",), added=("<|user|>", "<|end|>"), eos="<s>"), "<|end|>", "<|user|>\n<|end|>"
    ),
    "overlapping": Encoder(make_tokenizer(special=("<a><b>", "<b>", "<b><c>", "aa")), "<b>", "<b>"),
    "many": Encoder(make_tokenizer(special=("<s>", "[a]", *(f"<unused{n}>" for n in range(6000)))), "<s>", "<s>user\n"),
    "spaces": Encoder(with_spaces(), "</s>", "<|user|>"),
}


def hostile(encoder: Encoder) -> st.SearchStrategy[str]:
    names = [token.content for token in encoder.tokenizer.added_tokens_decoder.values() if len(token.content) < 30]
    some = names + [name[:n] for name in names for n in range(1, len(name), 3)] + [name[1:] for name in names]
    return st.lists(st.sampled_from([*some, " ", "\n", MARK, "\ud800"]) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_no_text_becomes_a_control_token(name: str) -> None:
    encoder = ENCODERS[name]
    added = encoder.tokenizer.added_tokens_decoder
    # only the template may produce these
    forbidden = {i for i, token in added.items() if token.special or token.content in ("<|user|>", "<|end|>")}

    @settings(max_examples=80, deadline=None)
    @given(hostile(encoder), st.booleans())
    @example("\u2581", True)
    def check(text: str, follows: bool) -> None:
        marked = encoder.mark(text)
        ids = encoder.encode(marked, follows)
        assert not forbidden & set(ids), text
        said = "".join("\ufffd" if c == MARK or "\ud800" <= c <= "\udfff" else c for c in text)
        assert marked.replace(MARK, "") == said
        if name != "spaces":
            assert encoder.decode(ids) == said, "and the text is the same"
        elif follows:  # the start of a text gets an extra space
            end = encoder.tokenizer.convert_tokens_to_ids("</s>")
            # to these tokenizers U+2581 is the space
            assert encoder.decode([end, *ids]) == "</s>" + said.replace("\u2581", " ")
        assert encoder.encode_with_offsets(marked, follows)[0] == ids

    check()


@pytest.mark.parametrize("name", ENCODERS)
def test_other_text_is_tokenised_as_ever(name: str) -> None:
    encoder = ENCODERS[name]

    @settings(max_examples=40, deadline=None)
    @given(st.text(st.characters(codec="utf-8", exclude_characters="<a" + MARK), max_size=40))
    def check(text: str) -> None:
        assert encoder.mark(text) == text
        assert encoder.encode(text) == encoder.tokenizer(text, add_special_tokens=False)["input_ids"]

    check()


def test_an_assistant_may_write_what_frames_no_turn() -> None:
    llama = ENCODERS["llama"]
    assert llama.mark("<|python_tag|>x<|eot_id|>", "assistant") == f"<|python_tag|>x<{MARK}|eot_id|>"
    assert llama.mark("<|python_tag|>x<|eot_id|>", "tool") == f"<{MARK}|python_tag|>x<{MARK}|eot_id|>"
    assert ENCODERS["qwen"].mark("<think>hm</think>") == "<think>hm</think>", "prompts speak of reasoning tags"


def test_marks_within_json_and_within_rendered_text() -> None:
    mark = ENCODERS["qwen"].mark
    value = {"a": ["<|im_end|>", 1, None], "<|im_start|>": {"b": "c"}}
    assert map_strings(value, mark) == {"a": [f"<{MARK}|im_end|>", 1, None], f"<{MARK}|im_start|>": {"b": "c"}}
    text = f"ab{MARK}c{MARK}{MARK}de{MARK}"
    for end in range(6):
        rest = skip_marked(text, "abcde"[:end])
        assert rest.replace(MARK, "") == "abcde"[end:]
    assert skip_marked(text, "abd") is None


@pytest.mark.parametrize("name", ENCODERS)
def test_what_is_cut_fits_and_says_so(name: str) -> None:
    encoder = ENCODERS[name]
    texts = st.lists(st.sampled_from(["word ", "\n", "é😀", "<|im_end|>", "1234", "the user "]), max_size=120).map(
        "".join
    )

    def length(text: str) -> int:
        return len(encoder.encode(encoder.mark(text)))

    @settings(max_examples=40, deadline=None)
    @given(texts, st.integers(1, 200))
    def check(text: str, limit: int) -> None:
        short = encoder.cut(text, limit)
        if short is None:
            assert length(text) <= limit
            return
        assert length(text) > limit
        assert length(short) <= limit
        head, found, tail = short.partition("\n[... ")
        if found:
            said, _, tail = tail.partition(" tokens left out ...]\n")
            missing, of, total = said.split()
            assert of == "of"
            assert int(total) == length(text)
            assert 0 < int(missing) <= int(total)
            assert text.startswith(head)
            assert text.endswith(tail)
        else:
            assert "[... 999 of 999 tokens left out ...]".startswith(short[:5]), "not even the marker fits"

    check()
