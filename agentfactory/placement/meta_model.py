"""The network that a recipe trains, built on the meta device without weights, for memory planning."""

import json
import logging
import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PretrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import inform
from agentfactory.placement.server_memory import meta_network
from agentfactory.rollout.model_hub import hub_answers, is_hub_name, stored_file
from agentfactory.rollout.text.load_renderer import FormatTokens
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, make_actor_critic
from agentfactory.trainers.networks.fp8 import fp8_linears
from agentfactory.trainers.networks.lora import TokenNeeds, tokens_to_train
from agentfactory.trainers.networks.network import resolve_batching, text_layers, trainable_config
from agentfactory.trainers.networks.policy import Policy, make_policy
from agentfactory.trainers.networks.vision_tower import adapted_modules, sees

logger = logging.getLogger(__name__)

SHAPES = Path(__file__).with_name("shapes")
"""Copies of the config.json published with the models of our recipes, as ORGANISATION--NAME.json."""


def load_config(path: str) -> tuple[PreTrainedConfig, str | None]:
    """Load a model's configuration from its folder, the hub, or with a note from `SHAPES`. Raises ValueError."""
    # the hub's own client retries for half a minute
    offline = is_hub_name(path) and not hub_answers(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=offline, trust_remote_code=False), None
    except (OSError, ValueError) as error:
        shape = SHAPES / f"{path.replace('/', '--')}.json"
        if offline and shape.is_file():
            config = AutoConfig.for_model(**json.loads(shape.read_text(encoding="utf-8")))
            note = "the hub cannot be reached; shapes are those of AgentFactory's copy of its config.json"
            return config, f"{path}: {note}"
        why = "the hub cannot be reached, and it was not downloaded before" if offline else str(error).splitlines()[0]
        raise ValueError(f"the configuration of {path} cannot be loaded: {why}") from error


_WITHOUT_WEIGHTS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("layer_types", "rope_parameters"),
)
"""Fields that affect results but no shape, or that are more readable than shapes."""


def difference(model: PretrainedConfig, served: PretrainedConfig) -> str | None:
    """Return the first difference between the architectures of `served`, such as a quantised copy, and `model`, such as
    "vocab_size is 152064, not 151936"; None if fields and shapes below the head are equal: an adapter fits both."""
    first, second = model.get_text_config(), served.get_text_config()
    for name in _WITHOUT_WEIGHTS:
        here, there = getattr(first, name, None), getattr(second, name, None)
        if here != there:
            return f"{name} is {there}, not {here}"
    for mine, other in zip_longest(_shapes(first).items(), _shapes(second).items()):
        if mine != other:
            return f"its weights have {_shown(other)} where {_shown(mine)} is expected"
    return None


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    network = meta_network(config, torch.float32)
    return {name: tuple(weight.shape) for name, weight in network.base_model.named_parameters()}


def _shown(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{entry[0]} of shape {list(entry[1])}" if entry else "nothing"


def meta_model(recipe: TrainRecipe, config: PreTrainedConfig) -> Policy | ActorCritic:
    """Return the network that a recipe's learner trains, on the meta device, by its code, without offload, and without
    liger's kernels, torch.compile, FlexAttention and FlashAttention, which take less memory than their replacements
    here. Raises ValueError if the recipe cannot be trained."""
    train = recipe.train
    dtype = getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32
    with torch.device("meta"):
        network = meta_network(config, dtype, whole=sees(config))
        batching = resolve_batching(network, train, measure=False)
        if recipe.model.lora and recipe.model.lora.quantization:
            # stand-ins for bitsandbytes' layers, inserted as transformers does: fake tensors cannot make the layers
            kept = get_keys_to_not_convert(network)
            for name, module in list(network.named_modules()):
                if type(module) is nn.Linear and should_convert_module(name, kept):
                    network.set_submodule(name, _FourBitLinear(module))
        if train.precision != "auto":
            _use_fp8(network)
        plain: dict[str, Any] = {"liger": False, "compile": False, "precision": "auto"}
        plain["gradient_checkpointing"] = bool(train.gradient_checkpointing)
        if train.attention.startswith("fl"):
            plain["attention"] = "auto"
        recipe = recipe.model_copy(update={"train": train.model_copy(update=plain)})
        # FlexAttention is not modelled: the options are those of a CPU
        policy = make_policy(recipe, network, batching)
        if not train.has_critic:
            return policy
        own = None if recipe.model.lora else meta_network(config, dtype, whole=sees(config))
        if own is not None and train.precision != "auto":
            _use_fp8(own)
        return make_actor_critic(recipe, policy, network=own)


def check_model(recipe: TrainRecipe, renderer: dict[str, Any] | None) -> None:
    """Check a model that exists as the trainer does: lengths, layout, an adapter's targets, and whether embedding and
    head, the only weights that are read, know the tokens of the chat format in a renderer's info (None: unknown here).
    Raises SettingError; `inform`s of what cannot be checked on this machine."""
    lora, path = recipe.model.lora, recipe.model.path
    if os.path.isabs(path) and not Path(path, "config.json").is_file():
        return
    try:
        config = trainable_config(recipe, lambda path: load_config(path)[0])
        network = meta_network(config, torch.float32, whole=sees(config))
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        reason = str(error).splitlines()[0]
        if is_hub_name(path):
            return inform(logger, f"model.path: {path}: its layers are not checked: {reason}")
        fix, problem = "name a causal language model in the transformers format", f"no network can be made of {path}"
        raise SettingError("model.path", f"{problem}: {reason}", fix) from error
    resolve_batching(network, recipe.train, measure=False)
    if lora is not None:
        adapted_modules(network, lora.target_modules, recipe.train.trains_vision)
    tokens, tables = FormatTokens.of_info(renderer or {}), _stored_tables(path, network)
    if tokens is None or tables is None:
        return inform(logger, f"model.path: {path}: no safetensors are here to check the rows of the format's tokens")
    tokens_to_train(*tables, recipe, TokenNeeds(tokens, load_tokenizer(path)))


def _stored_tables(path: str, network: Any) -> tuple[Tensor, Tensor] | None:
    """Return the stored embedding and head, mapped into memory; None if they are not on this machine."""
    modules = [network.get_input_embeddings(), network.get_output_embeddings()]
    ends = [f".{name.rpartition('.')[2]}.weight" for name, module in network.named_modules() if module in modules]
    index, tables = stored_file(path, "model.safetensors.index.json"), dict[str, Tensor]()
    parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index else ["model.safetensors"]
    for file in filter(None, (stored_file(path, part) for part in {*parts})):
        with safe_open(file, framework="pt") as opened:
            # the files of other versions of transformers have other prefixes
            found = [(name, end) for name in [*opened.keys()] for end in ends if f".{name}".endswith(end)]
            tables |= {end: opened.get_tensor(name) for name, end in found}
    if modules[0].weight is modules[1].weight:
        ends = ends[:1] * 2
    return (tables[ends[0]], tables[ends[1]]) if tables.keys() >= {*ends} else None


def policy_of(model: Policy | ActorCritic) -> Policy:
    return model.policy if isinstance(model, ActorCritic) else model


class _FourBitLinear(nn.Linear):
    """A linear layer of bitsandbytes' NF4 with double quantisation (arXiv:2305.14314, section 3): 4 bits per weight, 8
    for the constant of each block of 64, and 32 for that of 256 blocks: 4.127 in all."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        count, device = plain.weight.numel(), plain.weight.device
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        blocks = -(-count // 64)
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8, device=device))
        self.register_buffer("absmax_of_absmax", torch.empty(-(-blocks // 256), device=device))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _FourBitProduct.apply(x, self.out_features)
        return y


class _FourBitProduct(torch.autograd.Function):
    """Like bitsandbytes.autograd: nothing is saved, and the backward pass briefly holds one whole weight."""

    @staticmethod
    def forward(ctx, x: Tensor, out_features: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.shape = (out_features, x.shape[-1])
        return x.new_empty(*x.shape[:-1], out_features)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient @ gradient.new_empty(ctx.shape), None


def _use_fp8(network: Any) -> None:
    """Insert stand-ins where the trainer inserts torchao's layers: planning must not require torchao."""
    for layer, name, module in [*fp8_linears(text_layers(network))]:
        layer.set_submodule(name, _Float8Linear(module))


class _Float8Linear(nn.Linear):
    """A linear layer that takes as much memory as torchao's. Compiled layers fuse the casts, and take less."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Float8Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Float8Product(torch.autograd.Function):
    """Like torchao's matmul_with_hp_or_float8_args: saves operands uncast, and computes frozen weights' gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        operands = _cast(x), _cast(weight)
        return operands[0].new_empty(*x.shape[:-1], len(weight), dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        operands = _cast(gradient), _cast(weight).t().contiguous()
        of_x = gradient.new_empty(x.shape)
        # by columns of both; torchao keeps the earlier casts until it returns
        columns = _cast(gradient).mT.contiguous(), _cast(x).mT.contiguous()
        return of_x, operands[0].new_empty(columns[0].shape[-2], columns[1].shape[-2], dtype=gradient.dtype)


def _cast(x: Tensor) -> Tensor:
    """Return `x` in 8 bits: in float32, scaled by its largest absolute value, and clamped."""
    scale = x.abs().amax()
    return (x.to(torch.float32) * scale).clamp(-1.0, 1.0).to(torch.float8_e4m3fn)
