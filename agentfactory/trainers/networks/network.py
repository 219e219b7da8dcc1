"""The transformers network of a recipe: loading it, and options that change its computation but not its results."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.rollout.inference.sequence_lengths import check_lengths
from agentfactory.trainers.config import TrainConfig, TrainRecipe
from agentfactory.trainers.networks.attention import selects_keys
from agentfactory.trainers.networks.fp8 import use_fp8
from agentfactory.trainers.networks.vision_tower import sees, tower_of
from agentfactory.trainers.processes.sharding import load_on_rank_0

logger = logging.getLogger(__name__)


def load_network(recipe: TrainRecipe, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """Load the network of `model.path` on `device`, with transformers' own choice of attention. Without `dtype`, its
    weights are float32 if all are trained; the base of an adapter keeps the model's dtype, or uses four bits per
    weight. Under fsdp2 it stays on the CPU, with arbitrary weights on all ranks except 0: see `sharding`. Raises
    SettingError if it cannot be trained."""
    config, device = recipe.model, torch.device(device)
    if config.dtype == "float16":
        raise SettingError("model.dtype", "float16 gradients vanish without loss scaling", "use bfloat16 or float32")
    if (Path(config.path) / "adapter_config.json").exists():
        fix = "set it to the base that its adapter_config.json names, and model.lora.from to this folder"
        raise SettingError("model.path", f"{config.path} holds a LoRA adapter, not a model", fix)
    dtype = dtype or (getattr(torch, config.dtype) if config.lora else torch.float32)
    architecture = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=False)
    if recipe.train.algorithm != "sft" and recipe.train.from_trajectories is None:
        check_lengths(architecture.to_dict(), {"rollout.max_total_tokens": recipe.rollout.max_total_tokens})
    kind = class_of(architecture)
    load = partial(kind.from_pretrained, config.path, dtype=dtype, trust_remote_code=False)
    if config.lora and config.lora.quantization:
        # QLoRA (arXiv:2305.14314): 4-bit NormalFloat, with double quantisation of the blocks' constants
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.lora.quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        return _with_gradients(load(quantization_config=quantization, device_map={"": device}))
    if recipe.train.strategy == "fsdp2":
        return load_on_rank_0(load, kind, config.path, dtype)
    return load().to(device)


def class_of(config: Any) -> Any:
    """Return the transformers class for a configuration: with the vision tower if it is trained with images."""
    return transformers.AutoModelForImageTextToText if sees(config) else transformers.AutoModelForCausalLM


def _with_gradients(network: PreTrainedModel) -> PreTrainedModel:
    """Prevent bitsandbytes from converting 4-bit weights to another layout on CPUs with AVX512-BF16: training would
    then silently yield no gradients below such a layer, and compute in bfloat16."""
    # bitsandbytes is optional, and only this needs it
    from bitsandbytes.nn import Linear4bit

    for module in network.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return network


def apply_options(network: PreTrainedModel, train: TrainConfig, device: torch.device | str) -> None:
    """Apply attention implementation, layer kernels, FP8, compiled layers, gradient checkpointing and offloading in
    place, and freeze the vision tower unless it is trained. Raises SettingError."""
    device = torch.device(device)
    # with a mask, cuDNN's kernel on Hopper returns NaN gradients for the large activations of real models, such as
    # Qwen2.5 (https://github.com/pytorch/pytorch/issues/196678); torch's other kernels do not
    torch.backends.cuda.enable_cudnn_sdp(False)
    if selects_keys(network) and train.attention not in ("auto", "eager", "sdpa"):
        problem = f"{train.attention} would ignore the keys that {type(network).__name__} selects"
        raise SettingError("train.attention", problem, "use sdpa")
    if train.attention != "auto":
        if train.attention in ("flex_attention", "flash_attention_2"):
            _need_gpu("train.attention", train.attention, device)
        try:
            network.set_attn_implementation(train.attention)
        except (ImportError, ValueError) as error:
            raise SettingError("train.attention", f"{train.attention} cannot be used: {error}", "use sdpa") from error
    if train.liger:
        _need_gpu("train.liger", "true", device)
        _apply_liger(network)
    if train.precision != "auto":
        use_fp8(text_layers(network), train.precision, device)
    if train.compile or train.attention == "flex_attention":
        # variants: with or without gradients and mask, one line or several, before or after an adapter's first layer;
        # above the limit torch would run layers uncompiled, and FlexAttention with scores of length x length
        torch._dynamo.config.recompile_limit = 32
    tower = tower_of(network)
    if tower is None and train.trains_vision:
        problem = f"got {train.vision}, but {type(network).__name__} has no vision tower that can be trained"
        raise SettingError("train.vision", problem, "remove it, or train a model that accepts images")
    untrained: set[nn.Module] = set()
    if tower is not None and not train.trains_vision:
        tower.requires_grad_(False)
        # without gradients, none of its activations are stored
        untrained = set(tower.modules())
    for layer in decoder_layers(network) if train.compile or train.gradient_checkpointing else []:
        if layer in untrained:
            continue
        # wrap the instance's forward, not its call: the hooks of FSDP2 stay outside
        if train.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if train.gradient_checkpointing:
            # transformers' own checkpointing depends on module.training, which also turns dropout on
            offload = train.gradient_checkpointing == "offload"
            layer.forward = _checkpointed(layer.forward, offload, pin=device.type == "cuda")


def _checkpointed(forward: Callable[..., Any], offload: bool, pin: bool) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # checkpointing stores only a layer's inputs, so weights are not copied along
        with save_on_cpu(pin_memory=pin) if offload else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def _apply_liger(network: PreTrainedModel) -> None:
    if not is_installed("liger_kernel"):
        raise SettingError("train.liger", "liger-kernel is not installed", "run `pip install liger-kernel`")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = network.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise SettingError("train.liger", f"liger-kernel has no kernels for {kind}, but for {known}", "set false")
    # the policy has its own head and loss
    _apply_liger_kernel_to_instance(network, fused_linear_cross_entropy=False, cross_entropy=False)


def _need_gpu(field: str, value: str, device: torch.device) -> None:
    if device.type != "cuda":
        problem = f"{value} needs a CUDA GPU, and this process trains on the {device.type.upper()}"
        raise SettingError(field, problem, "remove it")


def body_of(network: Any) -> Any:
    """Return a network without its head: `base_model`, or `model` where that is the network itself (Llama 4)."""
    body = network.base_model
    return getattr(network, "model", network) if body is network else body


def decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost layers that transformers keeps on one device, including a vision tower's; call it before
    they are sharded. Raises SettingError if the network names none."""
    names = set(network._no_split_modules or ())
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in network.modules():
        if type(module).__name__ in names and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    if not layers:
        problem = f"{type(network).__name__} does not declare its layers (_no_split_modules)"
        raise SettingError("model.path", problem, "train it without fsdp2, compile, FP8 and gradient_checkpointing")
    return layers


def text_layers(network: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of `decoder_layers` outside a vision tower."""
    seeing = {*tower.modules()} if (tower := tower_of(network)) is not None else set()
    return [layer for layer in decoder_layers(network) if layer not in seeing]
