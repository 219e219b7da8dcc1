"""vLLM's command-line arguments, built from a recipe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentfactory.rollout.config import LoraConfig, RolloutRecipe
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS

AUTO_TOKENS = 16
"""Largest number of tokens that `model.lora.trainable_tokens: auto` trains."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM accepts."""


def vllm_arguments(recipe: RolloutRecipe, adapters: Mapping[str, Path], weight_transfer: str | None) -> list[str]:
    """Return the arguments of `vllm serve` beyond those that both engines share; `server.options.args` comes last."""
    server, lora = recipe.server, recipe.model.lora
    options = server.vllm
    # the trainer divides its logits by the temperature before it compares log-probabilities with the server's
    flags = ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    if options.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    if options.data_parallel_size > 1:
        flags += ["--data-parallel-size", str(options.data_parallel_size)]
    if options.gpu_memory_utilization is not None:
        flags += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if server.quantization is not None:
        flags += ["--quantization", server.quantization]
    ranks = [_adapter_rank(path) for path in adapters.values()] + ([adapter_rank(lora)] if lora else [])
    if ranks:
        rank = next((rank for rank in LORA_RANKS if rank >= max(ranks)), max(ranks))
        flags += ["--enable-lora", "--max-loras", str(recipe.max_loras), "--max-lora-rank", str(rank)]
    if (lora and lora.trainable_tokens is not None) or any(_has_rows(path) for path in adapters.values()):
        flags += [TABLE_ADAPTERS]
    if adapters:
        flags += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    if weight_transfer is not None:
        flags += ["--weight-transfer-config", json.dumps({"backend": weight_transfer})]
    return [*flags, *_image_flags(recipe), *options.args]


def _image_flags(recipe: RolloutRecipe) -> list[str]:
    """Return the flags for a vision-language model. The client resizes images, and the server must not resize them
    again."""
    flags = []
    limits = recipe.model.min_image_pixels, recipe.model.max_image_pixels
    if limits != (None, None):
        from agentfactory.rollout.images.families import load_vision

        vision = load_vision(recipe.model.path, *limits)
        if vision is not None and (options := vision.server_options()):
            flags = ["--mm-processor-kwargs", json.dumps(options)]
    parts = [*recipe.parts(), *recipe.held_out_parts()]
    images = [part.recipe.limits.images for part in parts] or [recipe.limits.images]
    if (known := [most for most in images if most is not None]) and len(known) == len(images):
        flags += ["--limit-mm-per-prompt", json.dumps({"image": max(known), "video": 0})]
    return flags


def adapter_rank(lora: LoraConfig) -> int:
    """Return the rank of an adapter that will be trained. Rows of tokens have the number of tokens as their rank."""
    if lora.trainable_tokens is None:
        return lora.rank
    return max(lora.rank, AUTO_TOKENS if lora.trainable_tokens == "auto" else len(lora.trainable_tokens))


def _adapter_rank(folder: Path) -> int:
    config = _config(folder)
    return max(int(config["r"]), *(config.get("rank_pattern") or {}).values(), 0)


def _has_rows(folder: Path) -> bool:
    """Return whether an adapter has rows of tokens: see `token_rows`."""
    return bool(_config(folder).get("rank_pattern"))


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return config
