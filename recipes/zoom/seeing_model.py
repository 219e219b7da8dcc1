"""Create an untrained multimodal network of 0.8 million parameters, and the image part of its tokenizer and
template."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PATCH, MERGED = 16, 2
TOKEN = PATCH * MERGED
"""Side in pixels of the square that one image token covers."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Special tokens of the tokenizer."""
_SHOW_PARTS = """\
{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""


def show_images(template: str) -> str:
    """Return the quickstart's text-only chat template with support for images."""
    return _SHOW_PARTS + template.replace("message.content", "show(message.content)")


def make_seeing_network(tokenizer: PreTrainedTokenizerFast, side: int, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return an untrained network with the Qwen3-VL architecture, for images of `side` x `side` pixels or smaller."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "initializer_range": 0.06,  # the usual 0.02 is for wide networks: here useful attention would form late
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "num_position_embeddings": (side // PATCH) ** 2,
            "initializer_range": 0.1,  # for the same reason: with 0.02, patterns are learned late or never
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Qwen3VLForConditionalGeneration(config)
        # the position of something must be as visible as its appearance
        nn.init.normal_(network.model.visual.pos_embed.weight, std=0.3)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    return network


def write_processors(folder: Path, side: int) -> None:
    """Write the configuration of image resizing, to at most the area of `side` x `side` pixels, into the folder of a
    model with its tokenizer."""
    processor = {
        "do_resize": True,
        "size": {"shortest_edge": TOKEN**2, "longest_edge": side**2},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    kinds = {"preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"}}
    kinds["video_preprocessor_config.json"] = {"video_processor_type": "Qwen3VLVideoProcessor"}
    for name, kind in kinds.items():
        described = {**kind, **processor, "processor_class": "Qwen3VLProcessor"}
        (folder / name).write_text(json.dumps(described, indent=1), encoding="utf-8")
    file = folder / "tokenizer_config.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**described, "processor_class": "Qwen3VLProcessor"}, indent=1), encoding="utf-8")
