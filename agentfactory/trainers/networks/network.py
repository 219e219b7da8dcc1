"""The transformers network of a recipe: its loading, options without effect on results, and layouts that are exact."""

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.rollout.images.features import Features, compute_features, encoder_outputs
from agentfactory.rollout.inference.sequence_lengths import LONGEST, check_lengths, position_limit, proof_length
from agentfactory.trainers.batches.batch import Batching
from agentfactory.trainers.batches.image_batches import Images
from agentfactory.trainers.batches.packing import grow
from agentfactory.trainers.config import TrainConfig, TrainRecipe
from agentfactory.trainers.networks import attention, layers
from agentfactory.trainers.networks.attention import selects_keys
from agentfactory.trainers.networks.fp8 import use_fp8
from agentfactory.trainers.networks.lora import has_adapter
from agentfactory.trainers.networks.vision_tower import is_rotary, sees, tower_is_trained, tower_of
from agentfactory.trainers.processes.accelerator import load_on_rank_0

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)


def load_network(recipe: TrainRecipe, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """Load the network of `model.path` on `device`, with transformers' own choice of attention. Without `dtype`, its
    weights are float32 if all are trained; the base of an adapter keeps the model's dtype, or uses four bits per
    weight. Under fsdp2 it is on the CPU: see `load_on_rank_0`. Raises SettingError if it cannot be trained."""
    config, device = recipe.model, torch.device(device)
    architecture = trainable_config(recipe, partial(transformers.AutoConfig.from_pretrained, trust_remote_code=False))
    dtype = dtype or (getattr(torch, config.dtype) if config.lora else torch.float32)
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
    if recipe.train.is_sharded:
        return load_on_rank_0(load, kind, config.path, dtype)
    return load().to(device)


def trainable_config(recipe: TrainRecipe, load: Callable[[str], Any]) -> Any:
    """Return the configuration of `model.path`, which `load` reads. Raises SettingError if it cannot be trained."""
    config = recipe.model
    if config.dtype == "float16":
        raise SettingError("model.dtype", "float16 gradients vanish without loss scaling", "use bfloat16 or float32")
    if (Path(config.path) / "adapter_config.json").exists():
        fix = "set it to the base that its adapter_config.json names, and model.lora.from to this folder"
        raise SettingError("model.path", f"{config.path} holds a LoRA adapter, not a model", fix)
    architecture = load(config.path)
    if recipe.train.algorithm != "sft" and recipe.train.from_trajectories is None:
        check_lengths(architecture.to_dict(), {"rollout.max_total_tokens": recipe.rollout.max_total_tokens})
    return architecture


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


def apply_options(network: PreTrainedModel, train: TrainConfig, device: torch.device | str, batching: Batching) -> None:
    """Apply attention implementation, layer kernels, FP8, compiled layers, gradient checkpointing and offloading in
    place, and freeze the vision tower unless it is trained. Raises SettingError."""
    device = torch.device(device)
    # with a mask, cuDNN's kernel on Hopper returns NaN gradients for the large activations of real models, such as
    # Qwen2.5 (https://github.com/pytorch/pytorch/issues/196678); torch's other kernels do not
    torch.backends.cuda.enable_cudnn_sdp(False)
    if selects_keys(network) and train.attention not in ("auto", "eager", "sdpa"):
        problem = f"{train.attention} would ignore the keys that {type(network).__name__} selects"
        raise SettingError("train.attention", problem, "use sdpa")
    kind = _attention_of(network, train, device, batching)
    if kind != "auto":
        if kind in ("flex_attention", "flash_attention_2"):
            need_gpu("train.attention", kind, device)
        try:
            network.set_attn_implementation(kind)
        except (ImportError, ValueError) as error:
            raise SettingError("train.attention", f"{kind} cannot be used: {error}", "use sdpa") from error
    if train.liger:
        need_gpu("train.liger", "true", device)
        _apply_liger(network)
    if train.precision != "auto":
        use_fp8(text_layers(network), train.precision, device)
    if train.compile or kind == "flex_attention":
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
            layers.use_torchs(layer)
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if train.gradient_checkpointing:
            # transformers' own checkpointing depends on module.training, which also turns dropout on
            offload = train.gradient_checkpointing == "offload"
            layer.forward = _checkpointed(layer.forward, offload, pin=device.type == "cuda")


def _attention_of(network: PreTrainedModel, train: TrainConfig, device: torch.device, batching: Batching) -> str:
    """Return `train.attention`; for auto, on a GPU, FlexAttention for rows that share a line, in one call per layer."""
    if train.attention != "auto" or batching == "padded" or device.type != "cuda" or not is_installed("triton"):
        return train.attention
    # a vision tower would get it, too
    if not getattr(network, "_supports_flex_attn", False) or tower_of(network) is not None or selects_keys(network):
        return "auto"
    config: Any = network.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width < 16:
        # which torch's kernel does not support
        return "auto"
    logger.info("train.attention: flex_attention, because rows share a line; sdpa is the other choice")
    return "flex_attention"


def _checkpointed(forward: Callable[..., Any], offload: bool, pin: bool) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # checkpointing stores only a layer's inputs, so weights are not copied along
        with save_on_cpu(pin_memory=pin) if offload else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def _apply_liger(network: PreTrainedModel) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = network.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise SettingError("train.liger", f"liger-kernel has no kernels for {kind}, but for {known}", "set false")
    # the policy has its own head and loss
    _apply_liger_kernel_to_instance(network, fused_linear_cross_entropy=False, cross_entropy=False)


def need_gpu(field: str, value: str, device: torch.device, fix: str = "remove it") -> None:
    if device.type != "cuda":
        problem = f"{value} needs a CUDA GPU, and this process trains on the {device.type.upper()}"
        raise SettingError(field, problem, fix)


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


class Backbone(nn.Module):
    """A transformers network; subclasses use its hidden states in `forward`."""

    def __init__(self, model: "PreTrainedModel | PeftModel", dtype: torch.dtype) -> None:
        """`dtype` is the precision of the forward pass; below float32 it runs under autocast."""
        super().__init__()
        self.model = model
        self.dtype = dtype
        attention.use_ours(self.network)
        layers.use_ours(model)

    @property
    def network(self) -> Any:
        """The transformers model, with adapter layers in place if there is an adapter."""
        return self.model.get_base_model() if has_adapter(self.model) else self.model

    @property
    def is_lora(self) -> bool:
        return has_adapter(self.model)

    @property
    def _no_split_modules(self) -> list[str]:
        # accelerate makes each module of these classes a unit of FSDP2
        return sorted({type(layer).__name__ for layer in decoder_layers(self.network)})

    def train(self, mode: bool = True) -> Self:
        """Switch only the adapter's dropout: another one would make log-probabilities differ from the server's."""
        super().train(False)
        self.training = mode
        for name, module in self.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def hidden(
        self,
        ids: Int[Tensor, "batch length"],
        positions: Int[Tensor, "1 length"] | None = None,
        ends: Int[Tensor, "1 length"] | None = None,
        images: Images | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return the network's hidden state of each token, before any head.

        `positions` and `ends` define which tokens attend to each other in a line of several rows or a tree, as in
        MicroBatch. Without them lines count from 0 and attend causally. `images` are the images in the lines."""
        arguments: dict[str, Any] = {}
        length, kind = ids.shape[1], self.network.config._attn_implementation
        if kind == attention.BY_BLOCKS:
            ids, positions, ends = attention.whole_blocks(ids, positions, ends)
        if positions is not None and ends is not None:
            arguments = attention.attention_arguments(kind, positions, ends, self.dtype)
        places = positions
        if is_rotary(self.network.config):
            places = _rotary(positions, images.rotary if images is not None else None)
        # each weight is used once, so autocast copies in self.dtype would only take up memory until the pass ends,
        # which gradient checkpointing and fsdp2 are meant to avoid
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype.itemsize < 4, cache_enabled=False):
            features = self._features(images) if images is not None else []
            if images is not None and images.places:
                arguments |= encoder_outputs(self.network, [features[number] for number in images.places])
            found = body_of(self.network)(input_ids=ids, position_ids=places, use_cache=False, **arguments)
        hidden = found.last_hidden_state[:, :length]
        if images is not None and not images.places:
            # every weight of the tower contributes to the result, so processes stay in step in the backward pass, too
            hidden = hidden + 0.0 * sum(part.sum() for image in features for part in (image.tokens, *image.deep))
        return hidden

    def _features(self, images: Images) -> list[Features]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and tower_is_trained(self.network)):
            return compute_features(self.network, images.inputs, images.counts)


def _rotary(
    positions: Int[Tensor, "1 length"] | None, rotary: Int[Tensor, "3 batch shorter"] | None
) -> Int[Tensor, "streams batch length"] | None:
    """Return position ids in time, height and width, or None if lines count from 0. If rows share a line, the positions
    in the rows come first, from which FlashAttention separates rows."""
    if rotary is None:
        return None if positions is None else positions.expand(4, *positions.shape)
    if positions is None:
        return rotary
    # lines of whole blocks end with tokens that no other token attends to
    rotary = nn.functional.pad(rotary, (0, positions.shape[-1] - rotary.shape[-1]))
    return torch.cat([positions.expand(1, *rotary.shape[1:]), rotary])


def resolve_batching(network: PreTrainedModel, train: TrainConfig, measure: bool = True) -> Batching:
    """Return `train.batching`; for "auto", tree if it is exact for this network, else padded.

    Call it while the network has transformers' choice of attention: `train.attention` may run only on a GPU. Without
    `measure` no weight is read. Raises SettingError if the requested layout would change the network's results."""
    if train.batching == "padded":
        return "padded"
    asked: Batching = "tree" if train.batching == "auto" else train.batching
    reason = _why_inexact(network, asked, train.attention, measure)
    if train.batching != "auto" and reason is not None:
        raise SettingError("train.batching", f"{asked} would be wrong: {reason}", "use padded, or auto")
    logger.info("train.batching: %s", asked if reason is None else f"padded, because {reason}")
    return asked if reason is None else "padded"


def _why_inexact(network: PreTrainedModel, batching: Batching, asked: str, measure: bool) -> str | None:
    config: Any = network.config.get_text_config()
    name = type(network).__name__
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # networks older than layer_types
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        return f"{name} has layers of {', '.join(others)}; only full_attention is exact"
    if selects_keys(network):
        return f"{name} selects keys per query"
    takes = inspect.signature(body_of(network).forward).parameters
    if "position_ids" not in takes or getattr(config, "alibi", False):
        return f"{name} does not accept position_ids"
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes.values()):
        return f"{name} passes no arguments to its attention"
    attention.use_ours(network)
    kind = network.config._attn_implementation if asked in ("auto", "sdpa") else asked
    packs = batching == "packed" and kind.startswith("flash_attention")
    if kind not in (attention.BY_RUNS, "flex_attention") and not packs:
        if asked in ("auto", "sdpa"):
            return f"{name} does not use transformers' attention interface"
        return f"train.attention={kind} does not support {batching} rows; use sdpa or flex_attention"
    if not measure:
        return None
    # a network's own declaration is not enough: some accept the arguments and do not use them
    try:
        error = _error(network, batching)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as fault:  # each network has its own
        return f"{name} fails on rows that share a line: {type(fault).__name__}: {fault}"
    # NaN is an error, too
    if not error <= (1e-4 if network.dtype == torch.float32 else 0.05):
        return f"{name} gives rows that share a line other results, by {error:.1g} of the largest value"
    return None


@torch.no_grad()
def _error(network: PreTrainedModel, batching: Batching) -> float:
    """Return the largest deviation of a line's hidden states from those of the rows alone, relative to the largest."""
    network.eval()
    backbone, rows = Backbone(network, network.dtype), proof_rows(network)
    alone = torch.cat([backbone.hidden(row[None])[0] for row in rows])
    numbered = list(enumerate(row.numpy(force=True) for row in rows))
    parts, paths, start = [], [], 0
    for tree in [grow(numbered)] if batching == "tree" else [grow([row]) for row in numbered]:
        parts.append((tree.ids, tree.positions, tree.ends + start))
        paths += [tree.paths[number] + start for number in sorted(tree.paths)]
        start += len(tree.ids)
    line, positions, ends = torch.from_numpy(np.hstack(parts)[:, None]).to(alone.device)
    shared = backbone.hidden(line, positions, ends)[0, torch.from_numpy(np.concatenate(paths)).to(alone.device)]
    return float((shared - alone).abs().max() / alone.abs().max())


def proof_rows(network: PreTrainedModel) -> list[Tensor]:
    """Return rows with common prefixes, in lexicographic order. The longest exceeds the lengths at which the network
    computes differently, as far as a proof at the start can."""
    config = network.config.get_text_config()
    fields = config.to_dict()
    limit, reach = position_limit(fields), getattr(config, "max_position_embeddings", None)
    # XLNet's is -1
    longest = min(2 * LONGEST if limit is None else limit.length, reach if reach and reach > 0 else 2 * LONGEST)
    tokens = torch.arange(min(proof_length(fields, longest) + 16, longest), device=network.device)
    # few and small ids: others may stand for images
    tokens = (tokens + tokens // 9) % 9 + 1
    rows = [tokens, torch.cat([tokens[:3], tokens[5:10]]), torch.cat([tokens[:5], tokens[9:15]])]
    rows = [row % config.vocab_size for row in rows]
    return sorted(rows, key=lambda row: row.tolist())
