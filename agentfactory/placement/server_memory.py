"""Memory that an inference server takes, from its recipe and the model's configuration alone. Weights are counted on
the network, on the meta device; GPU overheads and vLLM's runtime needs are assumed (machine.py)."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from agentfactory.placement.image_memory import server_image_memory
from agentfactory.placement.machine import CUDA_CONTEXT, CUDA_GRAPHS, LIBRARIES, NCCL_BUFFERS, SAMPLER_COPIES
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.embedded.engine import MASK_ELEMENTS, PREFILL_TOKENS
from agentfactory.rollout.inference.embedded.packed_linear import second_copies
from agentfactory.rollout.inference.embedded.step_plan import has_sliding_window, head_width
from agentfactory.rollout.inference.server_command_line import LORA_RANKS, adapter_rank
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.sync.nccl_sync import BUFFER_BYTES, BUFFERS

STEP_TOKENS = {160 * 2**30: 16384, 70 * 2**30: 8192, 0: 2048}
"""Least bytes of a device: prompt tokens that vLLM computes at a time (EngineArgs.get_batch_defaults)."""
SCORES = 3
"""embedded, with sinks: copies of a key head's scores, without and with the sinks, and after the softmax."""
EMBEDDED_SAMPLER_COPIES = 5
"""embedded: scaled logits, log-probabilities, probabilities, and their sums in float64."""


@dataclass(frozen=True)
class ServerMemory:
    """Bytes that one server takes on each of its devices."""

    parts: dict[str, int]
    """By row: weights, packed (copies in oneDNN's order), adapters, images, workspace, graphs (vLLM's), context.
    vLLM's share contains all but the context, which exists before its first MemorySnapshot (init_device)."""
    cache_per_token: int
    """Bytes of keys and values per token of a sequence."""
    cache_per_sequence: int
    """Bytes per sequence, independent of its length: states of linear attention, windows of sliding attention."""
    least_cache: int
    """embedded: exactly its cache; vLLM: the minimum with which a group of chains runs together."""
    by_nccl: int = 0
    """vLLM: bytes of arriving weights in a full sync by NCCL, beyond its configured share."""
    backup: int = 0
    """Bytes of host memory while it sleeps on a GPU."""


def server_memory(
    recipe: RolloutRecipe,
    config: PreTrainedConfig,
    device: str,
    served: PreTrainedConfig | None = None,
    device_memory: int | None = None,
) -> ServerMemory:
    """Return the memory of a recipe's server on each of its devices, of `device_memory` bytes (None: below 70 GiB).
    `config` is that of `model.path`, `served` that of `server.model` if it is set; `device` is cuda or cpu. Weights are
    quantised as `server.quantization` or the served model's quantization_config says, if the method is known."""
    server, embedded, dtype = recipe.server, recipe.server.engine == "embedded", getattr(torch, recipe.model.dtype)
    config = served or config
    network, text = meta_network(config, dtype, whole=not embedded or sees(config)), config.get_text_config()
    devices = server.devices // server.vllm.data_parallel_size
    weights = _weights(network, None if embedded else _bits_per_weight(server.quantization, config))
    adapters, cuda = _adapters(recipe, network, dtype), device == "cuda"
    captures = cuda and not embedded and _flag(server.vllm.args, "--enforce-eager") is None
    parts = {
        "weights": -(-round(sum(weights)) // devices),
        "packed": second_copies(network, server.max_num_seqs) if embedded and not cuda else 0,
        # from here at most, on each device: vLLM divides these only in part
        "adapters": sum(adapters),
        "images": server_image_memory(recipe, network, dtype, _step_tokens(recipe, device_memory)),
        "workspace": _workspace(recipe, network, dtype, device, device_memory),
        # captured with and without adapters (get_lora_capture_cases)
        "graphs": captures * CUDA_GRAPHS * (2 if recipe.model.lora else 1),
        "context": CUDA_CONTEXT + (NCCL_BUFFERS if devices > 1 else 0) if cuda else LIBRARIES,
    }
    is_fp8 = (_flag(server.vllm.args, "--kv-cache-dtype") or "").startswith("fp8")
    per_token, per_sequence = _cache(text, torch.float8_e4m3fn if is_fp8 else dtype, dtype, devices)
    if embedded:
        # as in Engine.cache_shape: all layers keep keys and values of all tokens
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        per_token, per_sequence = 2 * text.num_hidden_layers * heads * head_width(text) * dtype.itemsize, 0
        least = server.max_num_seqs * -(-server.max_model_len // 16) * 16 * per_token
        backup = sum(weights) + sum(adapters)
    else:
        chains = recipe.largest_group * -(-recipe.rollout.max_total_tokens // 16)
        # blocks of 16 tokens, one of which is never used (BlockPool.null_block)
        least = (1 + max(chains, -(-server.max_model_len // 16))) * 16 * per_token + recipe.largest_group * per_sequence
        backup = sum(map(_backup, [*weights, *adapters, 4 * server.max_num_seqs * text.vocab_size]))
    # the broadcasts that a worker holds at a time; each ends with the weight that fills it
    largest = sorted({id(weight): weight.nbytes for weight in network.parameters()}.values())[-BUFFERS:]
    parts, by_nccl = {name: size for name, size in parts.items() if size}, BUFFERS * BUFFER_BYTES + sum(largest)
    return ServerMemory(parts, per_token, per_sequence, least, 0 if embedded else by_nccl, round(backup))


def _backup(size: float) -> int:
    """Return the page-locked bytes to which a sleeping vLLM copies a tensor that it allocated while loading the model:
    segments of torch's allocator (CuMemAllocator.sleep), of 2 MiB for tensors of up to 1 MiB, of 20 MiB below 10 MiB,
    else one each. torch rounds page-locked memory up to powers of two (ATen/core/CachingHostAllocator.h, allocate)."""
    if size < 10 * 2**20:
        return round(size) if size <= 2**20 else 2**25 // int(20 * 2**20 // size)
    return 1 << (math.ceil(size) - 1).bit_length()


def meta_network(config: PreTrainedConfig, dtype: torch.dtype, whole: bool = False) -> PreTrainedModel:
    """Create the unquantised network of a configuration on the meta device; if `whole`, with towers."""
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kind: Any = AutoModelForImageTextToText if whole and hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        network: PreTrainedModel = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    return network


def _bits_per_weight(method: str | None, config: PreTrainedConfig) -> float | None:
    """Return the bits per weight of the layers' matrices, with scales; None if there is no known method."""
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = method or settings.get("quant_method")
    match method:
        case "fp8":
            return 8.0
        case "bitsandbytes":
            # a float32 constant for each block of 64
            return 8.0 if settings.get("load_in_8bit") else 4.5
        case "awq" | "gptq" | "awq_marlin" | "gptq_marlin":
            # a 16-bit scale and a zero point for each group; a group of -1 is a whole row
            bits, group = settings.get("bits", 4), settings.get("group_size", 128)
            return float(bits) if group < 0 else bits + (16 + bits) / group
        case "compressed-tensors":
            groups = [group["weights"] for group in settings["config_groups"].values() if group.get("weights")]
            return max(group["num_bits"] + 16 / (group.get("group_size") or 128) for group in groups)
    return None


def _weights(network: PreTrainedModel, bits: float | None) -> list[float]:
    kept = {id(table.weight) for table in (network.get_input_embeddings(), network.get_output_embeddings()) if table}
    size = 0 if bits is None else bits / 8
    return [w.numel() * size if size and w.ndim > 1 and id(w) not in kept else w.nbytes for w in network.parameters()]


def _adapters(recipe: RolloutRecipe, network: Any, dtype: torch.dtype) -> list[int]:
    """Return the bytes of each tensor of adapters. vLLM allocates `max_loras` slots at a rank that it supports, for all
    linear modules and experts of the language model, and for embedding and head if its class has `embedding_modules`;
    Qwen2's has none unless TABLE_ADAPTERS adds them (_create_lora_modules). The embedded engine stores the adapters."""
    lora, text = recipe.model.lora, network.config.get_text_config()
    if lora is None:
        return []
    is_vllm, rank = recipe.server.engine == "vllm", adapter_rank(lora)
    rank = next((known for known in LORA_RANKS if is_vllm and known >= rank), rank)
    whole = not is_vllm or _flag(recipe.server.vllm.args, "--enable-tower-connector-lora") is not None
    part = network if whole else network.get_decoder()
    adapted = [module.weight for module in part.modules() if isinstance(module, nn.Linear)]
    if is_vllm and (lora.trainable_tokens is not None or not text.model_type.startswith("qwen2")):
        adapted += [network.get_input_embeddings().weight, network.get_output_embeddings().weight]
    experts = [(name, w) for name, w in part.named_parameters() if is_vllm and w.ndim == 3 and w.shape[1] > 1]
    # gate and up of experts have separate slots
    widths = [len(w) * n for name, w in experts for n in (*w.shape[1:], text.hidden_size * ("gate_up" in name))]
    widths += [width for weight in adapted for width in weight.shape]
    return [recipe.max_loras * rank * width * dtype.itemsize for width in widths]


def _workspace(
    recipe: RolloutRecipe, network: PreTrainedModel, dtype: torch.dtype, device: str, device_memory: int | None
) -> int:
    """Return the bytes of a step: activations, masks and the sampler; embedded: captured steps. vLLM: profile_run."""
    server, text = recipe.server, network.config.get_text_config()
    # the residual stream, its norm, attention's inputs and output; gate, up and their product
    width = 4 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    logits = server.max_num_seqs * text.vocab_size
    if server.engine == "embedded":
        keys = -(-server.max_model_len // 16) * 16
        ratio = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        # padded queries, and idle slots between busy ones, may double them
        elements = 2 * min(MASK_ELEMENTS, PREFILL_TOKENS[device] * keys)
        masks = elements * (ratio * dtype.itemsize + 1) * (2 if has_sliding_window(text) else 1)
        if any(name.endswith(".sinks") for name, _ in network.named_parameters()):
            masks += SCORES * elements * ratio * dtype.itemsize  # of one key head at a time
        # captured steps write their logits to one more copy
        graphs = CUDA_GRAPHS + logits * dtype.itemsize if device == "cuda" else 0
        sampler = logits * (4 * EMBEDDED_SAMPLER_COPIES + dtype.itemsize)
        # the masks are freed before tokens are sampled
        return max(PREFILL_TOKENS[device] * width * dtype.itemsize + masks, sampler) + graphs
    step = _step_tokens(recipe, device_memory) * width * dtype.itemsize
    return max(step, logits * (dtype.itemsize + 4)) + logits * 4 * SAMPLER_COPIES


def _step_tokens(recipe: RolloutRecipe, device_memory: int | None) -> int:
    asked = _flag(recipe.server.vllm.args, "--max-num-batched-tokens")
    return int(asked) if asked else next(n for least, n in STEP_TOKENS.items() if (device_memory or 0) >= least)


def _flag(args: Sequence[str], name: str) -> str | None:
    """Return the value of a vLLM flag, "" if it has none; None if the flag is absent."""
    parts = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    return (*parts, "")[parts.index(name) + 1] if name in parts else None


def _cache(text: Any, dtype: torch.dtype, state_dtype: torch.dtype, devices: int) -> tuple[int, int]:
    """Return bytes on each of `devices` per token, and per sequence."""
    layers = text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # heads are divided among devices, and repeated if there are fewer heads than devices
    token = 2 * -(-heads // devices) * width * dtype.itemsize
    if getattr(text, "kv_lora_rank", None):
        # multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): every device stores all of it
        token = (text.kv_lora_rank + text.qk_rope_head_dim) * dtype.itemsize
    windows, states = kinds.count("sliding_attention") if window else 0, kinds.count("linear_attention")
    per_sequence = windows * token * window if windows else 0
    if states:
        # of a gated delta net (arXiv:2412.06464): the convolution's last inputs and the recurrent state, in float32
        # unless the model sets another dtype
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        recurrent = getattr(torch, getattr(text, "mamba_ssm_dtype", None) or "float32")
        convolution = (2 * keys + values) * (text.linear_conv_kernel_dim - 1) * state_dtype.itemsize
        state = convolution + values * text.linear_key_head_dim * recurrent.itemsize
        per_sequence += states * -(-state // devices)
    # a layer of an unknown kind counts as one with full attention
    return (len(kinds) - windows - states) * token, per_sequence
