"""Generated small vision-language models with random weights, of the kinds Qwen2.5-VL and Qwen3-VL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.placement.shapes import sizes

KINDS = ("qwen2_5_vl", "qwen3_vl")
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
TEXT: dict[str, Any] = {**sizes(64, 128, 2, 2, 1, 512), "max_position_embeddings": 4096}


def ends_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def vision_template(kind: str) -> str:
    """Return the chat template that models of this kind ship with."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{kind}.jinja").read_text(encoding="utf-8")


def train_tokenizer(
    special: Sequence[str], words: str, template: str, size: int = 400, **options: Any
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of single bytes and a few words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet)
    core.train_from_iterator([words] * 50, trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends, **options)
    tokenizer.chat_template = template
    return tokenizer


def vision_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer with the special tokens of Qwen's."""
    words = "user assistant system tool You are a helpful assistant. zoom crop image bbox_2d answer What is shown?"
    return train_tokenizer(_SPECIAL, words, vision_template(kind))


def write_model(folder: Path, network: Any, tokenizer: PreTrainedTokenizerFast, name: str, **files: Any) -> None:
    """Write a network whose distributions are far from uniform, so that a wrong context shows, its tokenizer, and the
    descriptions of its image and video processors."""
    network = network.float()
    for parameter in network.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.08)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    common = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    for file, described in files.items():
        write_json(folder / f"{file}.json", {**common, "do_convert_rgb": True, **described, "processor_class": name})
    known = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**known, "processor_class": name})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def make_vision_model(folder: Path, kind: str = "qwen3_vl", seed: int = 0, tied: bool = False) -> Path:
    """Write a model of `kind`, 0.3 million random weights, with its tokenizer and processors to `folder`."""
    tokenizer = vision_tokenizer(kind)
    ids = tokenizer.convert_tokens_to_ids
    text = {**TEXT, **ends_of(tokenizer)}
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    torch.manual_seed(seed)
    if kind == "qwen2_5_vl":
        patch, name = 14, "Qwen2_5_VLProcessor"
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        text["rope_parameters"] = {**rope, "mrope_section": [4, 6, 6]}
        tower |= {"depth": 2, "fullatt_block_indexes": [1], "patch_size": patch, "window_size": 56}
        config: Any = Qwen2_5_VLConfig
        network: Any = Qwen2_5_VLForConditionalGeneration
    else:
        patch, name = 16, "Qwen3VLProcessor"
        mean = std = [0.5, 0.5, 0.5]
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}
        tower |= {"depth": 3, "patch_size": patch, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        config, network = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    made = network(
        config(
            text_config=text,
            vision_config=tower,
            tie_word_embeddings=tied,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    )
    processor = {
        "size": {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2},
        **{"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2},
        # vLLM dies at start without these two
        **{"image_mean": mean, "image_std": std},
    }
    video = "Qwen3VLVideoProcessor" if kind == "qwen3_vl" else "Qwen2VLVideoProcessor"
    files = {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorFast", **processor}}
    files["video_preprocessor_config"] = {"video_processor_type": video, **processor}
    write_model(folder, made, tokenizer, name, **files)
    return folder
