"""Small networks with tokens that they cannot tell from others, and pushes of trained rows to a server."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from agentfactory.rollout.text.load_renderer import FormatTokens, make_renderer
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.lora import TokenNeeds
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.proven_push import push_proven
from agentfactory.trainers.sync.server_control import ServerControl
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.placement.shapes import sizes

OPEN, CLOSE = "<tool_call>", "</tool_call>"
VOCABULARY = 512
SIZES: dict[str, Any] = {
    **sizes(64, 32, 2, 2, 1, VOCABULARY),
    **{"head_dim": 32, "initializer_range": 0.3, "max_position_embeddings": 256},
}
KINDS: dict[str, tuple[Any, bool]] = {
    "tied": (Qwen3Config, True),
    "untied": (Qwen2Config, False),
    "scaled": (Gemma3TextConfig, True),
    "llama": (LlamaConfig, False),
}
"""Name -> configuration, and whether head and embedding are one table."""


def make_needs(parser: str = "auto") -> TokenNeeds:
    tokenizer: PreTrainedTokenizerBase = make_tokenizer(trl_template("qwen2_5"))
    tokens = FormatTokens.of_info(make_renderer(tokenizer, parser=parser).info)
    return TokenNeeds(tokens, tokenizer)


def make_untrained(kind: str, folder: Path, needs: TokenNeeds) -> Path:
    """Save a network whose rows of the call's tags are those of the unused ids, as in Qwen2.5-Coder."""
    config, tied = KINDS[kind]
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config(**SIZES, tie_word_embeddings=tied))
    tags = [needs.tokens.written[OPEN], needs.tokens.written[CLOSE]]
    with torch.no_grad():
        for table in (network.get_input_embeddings(), network.get_output_embeddings()):
            table.weight[[*tags, *range(470, 512)]] = table.weight[511] + 1e-3 * torch.randn(44, 64)
    network.save_pretrained(folder)
    needs.tokenizer.save_pretrained(folder)
    return folder


def recipe_of(
    model: Path, tokens: Any = "auto", lora: bool = True, quantization: str | None = None, **train: Any
) -> TrainRecipe:
    rows = {"trainable_tokens": tokens} if tokens else {}
    given = {"rank": 2, "quantization": quantization, **rows} if lora else None
    of_model = {"path": str(model), "dtype": "float32", "lora": given}
    return TrainRecipe.model_validate({"model": of_model, "train": {"steps": 1, **train}})


def change(policy: Policy, seed: int) -> Policy:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.05 if "lora" in name else 0.3)
    return policy


def push_versions(model: Path, needs: TokenNeeds, url: str, folder: Path, lost: str | None = None) -> dict[str, float]:
    """Push the initial adapter with its rows, then a changed one, and return the last proof's metrics. With `lost`, the
    servers get an adapter without the weights whose names contain it."""
    policy = load_policy(recipe_of(model), needs=needs)
    server = ServerControl(url, None)
    canary = Canary([server], canary_rows(range(20, 400), 120), "float32")
    canary.watch(policy.trained_tokens)
    if lost is not None:
        save = policy.save_adapter

        def save_less(folder: Path, state: Any) -> Path:
            file = save(folder, state)
            save_file({name: value for name, value in load_file(file).items() if lost not in name}, file)
            return file

        policy.save_adapter = save_less  # type: ignore[method-assign]
    sync = LoraSync([server], folder, f"{folder.name}-v", keep=2)
    metrics: dict[str, float] = {}
    try:
        for version in range(2):
            scores = canary.trainer_scores(policy)
            _, metrics = push_proven(sync, canary, version, policy, policy.gather(), scores)
            change(policy, version)
    finally:
        sync.close()
    return metrics
