"""Create a tokenizer and an untrained network of half a million parameters, for the transcripts of its SFT."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of the tokenizer."""


def make_model(
    folder: Path,
    transcripts: list[list[dict[str, Any]]],
    specs: list[dict[str, Any]],
    seed: int,
    tokens: int = 1000,
    tied: bool = False,
) -> None:
    """Write a model and its tokenizer of at most `tokens` into `folder`, for conversations such as `transcripts` with
    the tools `specs` (in the OpenAI format). `tied` embeddings help to copy words."""
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(transcripts, specs, template, SPECIAL, tokens)
    tokenizer.save_pretrained(folder)
    make_network(tokenizer, seed, tied=tied).save_pretrained(folder)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(
    transcripts: list[list[dict[str, Any]]],
    specs: list[dict[str, Any]],
    template: str,
    special: Sequence[str],
    tokens: int = 1000,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that splits only at digits and line ends, so that a call is a handful of tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def wrap() -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
        tokenizer.chat_template = template
        return tokenizer

    texts = [wrap().apply_chat_template(messages, tools=specs, tokenize=False) for messages in transcripts[:1000]]
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return wrap()


def make_network(
    tokenizer: PreTrainedTokenizerFast, seed: int, rope_theta: float = 100.0, tied: bool = False
) -> Qwen3ForCausalLM:
    """Return an untrained network with the Qwen3 architecture. `tied` embeddings help to copy words."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=0.06,  # the usual 0.02 is for wide networks: here, useful attention would form late
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
