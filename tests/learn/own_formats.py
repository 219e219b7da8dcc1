"""Prepares the quickstart's hunts for networks of other architectures, each with the chat template and the tool-call
format that it is published with: gpt-oss, and DeepSeek V3.1.

`agentfactory train recipes/quickstart/quickstart.yaml prepare=tests/learn/own_formats.py:gpt_oss`"""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agentfactory.base.messages import ToolSpec
from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.parsers import AUTO

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
split_tasks, play_transcripts, hunt = (
    load_object(f"prepare.py:{name}", QUICKSTART) for name in ("split_tasks", "play_transcripts", "TreasureHunt")
)
write_jsonl = load_object("tiny_model.py:write_jsonl", QUICKSTART)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "dtype": "float32",
}
"""As in the quickstart's network."""


def gpt_oss(folder: Path, seed: int) -> None:
    """Prepare for gpt-oss: harmony, sinks, a sliding window in every second layer, four experts."""
    trl = find_spec("trl")
    template = (Path(trl.origin).parent / "chat_templates" / "gptoss.jinja").read_text(encoding="utf-8")
    names = ("endoftext", "start", "end", "message", "channel", "constrain", "return", "call")
    tokenizer = write_tasks(folder, seed, template, [f"<|{name}|>" for name in names], eos="<|return|>")
    config = GptOssConfig(
        **SIZES,
        **_tokens(tokenizer),
        intermediate_size=192,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    save(GptOssForCausalLM, config, folder, seed)


def deepseek(folder: Path, seed: int) -> None:
    """Prepare for DeepSeek V3.1: latent attention, a shared and four routed experts."""
    file = REPOSITORY / "tests" / "rollout" / "model_templates" / "deepseek_v3_1.jinja"
    names = (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁output▁begin", "tool▁output▁end"),
    )
    tokens = [*(f"<｜{name}｜>" for name in names), "<think>", "</think>"]
    tokenizer = write_tasks(folder, seed, file.read_text(encoding="utf-8"), tokens, eos=tokens[1])
    config = DeepseekV3Config(
        **SIZES,
        **_tokens(tokenizer),
        intermediate_size=384,
        moe_intermediate_size=96,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    )
    save(DeepseekV3ForCausalLM, config, folder, seed)


def write_tasks(
    folder: Path, seed: int, template: str, tokens: list[str], eos: str, parser: str = AUTO
) -> PreTrainedTokenizerFast:
    """Write the quickstart's hunts and transcripts, and return a tokenizer with these special tokens, which was trained
    on the transcripts as `template` and `parser` write them."""
    rng = random.Random(seed)
    train, heldout = split_tasks(rng)
    spec: ToolSpec = hunt.move.spec
    transcripts = play_transcripts(train, rng)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    rows = [{"messages": messages, "tools": [spec.to_openai()]} for messages in transcripts]
    write_jsonl(folder / "transcripts.jsonl", rows)

    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    # as in the quickstart: a call is a handful of tokens
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def train_on(texts: list[str]) -> PreTrainedTokenizerFast:
        trainer = trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=tokens[0], eos_token=eos)
        tokenizer.bos_token = tokens[0]
        tokenizer.chat_template = template
        return tokenizer

    renderer = make_renderer(train_on([]), parser=parser)
    tools = [spec.to_openai()] if renderer.parser.native else None
    told = (renderer.dialogue.instruct(messages, [spec]) for messages in transcripts[:1000])
    texts = [renderer.template.render(messages, tools) for messages in told]
    for token in tokens:
        texts = [text.replace(token, "\n") for text in texts]
    tokenizer = train_on(texts)
    tokenizer.save_pretrained(folder / "model")
    return tokenizer


def save(network: type[PreTrainedModel], config: Any, folder: Path, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network(config).save_pretrained(folder / "model")


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"vocab_size": len(tokenizer), **ends}
