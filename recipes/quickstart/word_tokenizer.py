"""Create a tokenizer in which each word, and each fixed piece of text, is one token."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BRIEF_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>\\n' }}
    {%- set tools = none %}
{%- endif %}
""" + Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
"""The quickstart's chat template with the tools' names only: their schemas would be half of each conversation."""


def train_word_tokenizer(
    texts: list[str], pieces: Sequence[str], phrases: Sequence[str], template: str, special: Sequence[str], tokens: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `tokens` that splits at words. Each of `pieces` is an additional token,
    wherever it occurs, and so is each of `phrases` as whole words: so small a network copies a text only if it is the
    same token in both places."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex("[A-Za-z0-9]+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    bpe.add_tokens([AddedToken(phrase, normalized=False, single_word=True) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer
