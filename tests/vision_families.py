"""Generated small random models of the families that use their own image processor, and of GLM.

They need torchvision where transformers' processors do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from agentfactory.base.user_code.import_path import is_installed
from tests.vision_models import TEXT, ends_of, train_tokenizer, write_json, write_model

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOWER |= {"intermediate_size": 64, "patch_size": 14}
_CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for p in m.content -%}{{ IMAGE if p.type == 'image' else p.text }}{%- endfor -%}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def _internvl(folder: Path) -> None:
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    named["video_token"] = "<video>"
    tokenizer = _tokenizer([*_CHAT, *named.values()], "<IMG_CONTEXT>", **named)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **ends_of(tokenizer)},
        vision_config={**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12}
    _write(folder, InternVLForConditionalGeneration(config), tokenizer, "InternVL", "GotOcr2", {**size, **_CLIP})
    write_json(folder / "processor_config.json", {"image_seq_length": 4, "processor_class": "InternVLProcessor"})


def _mistral3(folder: Path) -> None:
    marks = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = _tokenizer([*_CHAT, *marks], marks[0])
    config = Mistral3Config(
        text_config={"model_type": "mistral", "head_dim": 32, **TEXT, "sliding_window": None, **ends_of(tokenizer)},
        vision_config={"model_type": "pixtral", **_TOWER, "head_dim": 16, "image_size": 224},
        image_token_index=tokenizer.convert_tokens_to_ids(marks[0]),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    size = {"size": {"longest_edge": 224}, "patch_size": 14}
    _write(folder, Mistral3ForConditionalGeneration(config), tokenizer, "Pixtral", "Pixtral", {**size, **_CLIP})
    names = dict(zip(("image_token", "image_break_token", "image_end_token"), marks, strict=True))
    described = {"patch_size": 14, "spatial_merge_size": 2, **names, "processor_class": "PixtralProcessor"}
    write_json(folder / "processor_config.json", described)


def _tiles(folder: Path, name: str, config_class: Any, network: Any) -> None:
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    marks += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer([*_CHAT, *marks], "<image>")
    config = config_class(
        text_config={"model_type": "llama", **TEXT, **ends_of(tokenizer)},
        vision_config={**_TOWER, "image_size": 56},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    size = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True}
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_pad": True, "resample": 1}
    _write(folder, network(config), tokenizer, name, name, {**size, **halves})
    write_json(folder / "processor_config.json", {"image_seq_len": 4, "processor_class": f"{name}Processor"})


def _glm(folder: Path, config_class: Any, network: Any, text: dict[str, Any]) -> None:
    parts = ("begin_of_image", "end_of_image", "video", "image", "begin_of_video", "end_of_video")
    tokenizer = _tokenizer([*_CHAT, *(f"<|{part}|>" for part in parts)], "<|begin_of_image|><|image|><|end_of_image|>")
    ids, ends = tokenizer.convert_tokens_to_ids, ends_of(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    tower = {**_TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "image_size": 56}
    config = config_class(
        # transformers' layers always have biases, vLLM's only if this is set, as in published models
        text_config={**TEXT, **text, "attention_bias": True, "head_dim": 32, "rope_parameters": rope, **ends},
        vision_config={key: tower[key] for key in tower if not key.startswith("num_") or key == "num_heads"},
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        image_start_token_id=ids("<|begin_of_image|>"),
        image_end_token_id=ids("<|end_of_image|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
    )
    # the pixels of an image count twice
    size = {"size": {"shortest_edge": 2 * 4 * 28**2, "longest_edge": 2 * 64 * 28**2}, "patch_size": 14}
    patches = {"temporal_patch_size": 2, "merge_size": 2}
    _write(folder, network(config), tokenizer, "Glm4v", "Glm4v", {**size, **patches, **_CLIP})


_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_MADE: dict[str, tuple[Any, ...]] = {
    "glm4v": (_glm, Glm4vConfig, Glm4vForConditionalGeneration, {}),
    "glm4v_moe": (_glm, Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, _EXPERTS),
    "internvl": (_internvl,),
    "mistral3": (_mistral3,),
    "idefics3": (_tiles, "Idefics3", Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": (_tiles, "SmolVLM", SmolVLMConfig, SmolVLMForConditionalGeneration),
}
"""Kind -> the function that writes its model, and the function's arguments after the folder."""
FAMILIES = tuple(kind for kind in _MADE if kind != "glm4v_moe")
"""The kinds that vLLM serves on a CPU."""
_NEEDED = {"glm4v": (), "smolvlm": ("torchvision", "num2words")}
OWN = ("internvl", "mistral3", "idefics3", "smolvlm")
"""The kinds that use their own image processor."""


def params_of(kinds: Sequence[str], *marks: Any) -> list[Any]:
    """Return a fixture's parameters with `marks`; kinds with missing packages are skipped."""
    missing = {kind: [n for n in _NEEDED.get(kind, ("torchvision",)) if not is_installed(n)] for kind in kinds}
    skips = {kind: pytest.mark.skipif(bool(lack), reason=f"needs {', '.join(lack)}") for kind, lack in missing.items()}
    return [pytest.param(kind, marks=[skips[kind], *marks]) for kind in kinds]


def make_family(folder: Path, kind: str) -> Path:
    """Write a model of `kind`, 0.3 million random weights, with its tokenizer and processors to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    make, *arguments = _MADE[kind]
    make(folder, *arguments)
    return folder


def _tokenizer(special: Sequence[str], image: str, **named: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer of single bytes and a few words; its chat template writes `image` for an image."""
    words, template = "user assistant system tool You are helpful. What is shown?\n\n\n", _TEMPLATE
    return train_tokenizer(special, words, template.replace("IMAGE", repr(image)), 440, extra_special_tokens=named)


def _write(
    folder: Path, network: Any, tokenizer: PreTrainedTokenizerFast, name: str, images: str, processor: dict[str, Any]
) -> None:
    files = {"preprocessor_config": {"image_processor_type": f"{images}ImageProcessor", **processor}}
    files["video_preprocessor_config"] = {"video_processor_type": f"{name}VideoProcessor", **processor}
    write_model(folder, network, tokenizer, f"{name}Processor", **files)
