"""FP8 training: products of linear layers in 8-bit floating point, by torchao (extra `fp8`).

Weights stay plain parameters under their own names. Each product casts its operands, with scales from their current
values: activations and weights to e4m3, gradients to e5m2 (`fp8`) or e4m3 (`fp8_rowwise`). torchao is called directly:
accelerate's `mixed_precision: fp8` would also convert adapters and vision towers, and add its own autocast."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import inform
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.trainers.config import Precision

logger = logging.getLogger(__name__)

FIELD = "train.precision"
_SCALING = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
"""Value of `train.precision` -> torchao's recipe."""
_MULTIPLE = 16
"""The kernels read rows of both operands in blocks of 16 bytes."""
_ROUTERS = ("gate", "router")
"""Names of linear layers that choose experts. They are small, and rounding would send tokens to other experts."""
_SHARD = "fp8_shard"
"""Attribute of layers whose weights fsdp2 gathers in FP8: this process's shard, and the group of all shards."""
_FP8_SINCE = (8, 9)
"""The lowest compute capability of GPUs with FP8: Ada."""


def fp8_linears(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (layer, name in it, linear layer) of all that compute in FP8: those within decoder `layers` with sizes in
    multiples of 16, except routers. Adapters are added later: their matrices are narrow, so casts would cost more."""
    for layer in layers:
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
                continue
            if module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0:
                yield layer, name, module


def use_fp8(layers: list[nn.Module], precision: Precision, device: torch.device) -> None:
    """Make the linear layers within decoder `layers` compute in FP8, in place; on a CPU, cast values are multiplied in
    float32. Raises SettingError if torchao is missing, the GPU has no FP8, or no layer can compute in it."""
    if not is_installed("torchao"):
        problem = f"{precision} needs torchao, which is not installed"
        raise SettingError(FIELD, problem, "run `pip install 'torchao>=0.18,<0.19'`")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _FP8_SINCE:
        has, needs = (".".join(map(str, version)) for version in (found, _FP8_SINCE))
        problem = f"{torch.cuda.get_device_name(device)} has compute capability {has}, and FP8 needs {needs}"
        raise SettingError(FIELD, problem, "use auto")
    chosen = {module for _, _, module in fp8_linears(layers)}
    if not chosen:
        problem = f"got {precision}, and no linear layer has sizes that are multiples of {_MULTIPLE}"
        raise SettingError(FIELD, problem, "use auto")
    # torchao is optional, and only this needs it
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device.type != "cuda":
        inform(logger, f"{FIELD}={precision} is emulated on this CPU: it rounds as on a GPU, and is slower than auto")
    config = Float8LinearConfig.from_recipe_name(_SCALING[precision])
    # gradients of weights are sums over tokens, of which a micro-batch has any number
    config = replace(config, pad_inner_dim=True, emulate=device.type != "cuda")
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, name: module in chosen, config=config)


def gather_in_fp8(model: nn.Module) -> None:
    """Make fsdp2 gather the weights of the sharded `model`'s tensorwise FP8 layers in FP8: plain shards carry torchao's
    two functions, which FSDP2 looks up when it first gathers. With torchao's own switch, accelerate could not tell the
    weights apart, and checkpoints would contain its tensor class."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    casts: list[WeightWithDynamicFloat8CastTensor] = []
    for module in model.modules():
        if not isinstance(module, Float8Linear) or not isinstance(module.weight, DTensor):
            continue
        cast = module.config.cast_config_weight
        if cast.scaling_granularity is not ScalingGranularity.TENSORWISE:
            return
        # the last dimension is that of the shards
        group = module.weight.device_mesh.get_group(module.weight.device_mesh.ndim - 1)
        # torchao does not pad shards of unequal sizes; such a weight is gathered in its own precision
        if module.out_features % group.size():
            continue
        shard: Any = module.weight._local_tensor
        casts.append(WeightWithDynamicFloat8CastTensor(shard.detach(), module.linear_mm_config, cast.target_dtype))
        setattr(module, _SHARD, (shard.detach(), group))
        shard.fsdp_pre_all_gather = casts[-1].fsdp_pre_all_gather
        shard.fsdp_post_all_gather = casts[-1].fsdp_post_all_gather
    if not casts:
        return

    @torch.no_grad()
    def scale(*args: Any) -> None:
        # one collective call, as in precompute_float8_dynamic_scale_for_fsdp; before each pass, since weights change
        largest = torch.stack(torch._foreach_norm([cast._tensor for cast in casts], ord=torch.inf)).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        for cast, one in zip(casts, amax_to_scale(largest, casts[0]._dtype), strict=True):
            cast._precomputed_scale = one

    model.register_forward_pre_hook(scale, prepend=True)


@contextmanager
def in_high_precision(model: nn.Module) -> Iterator[None]:
    """Make the FP8 layers of `model` compute in their operands' precision, for passes without gradients in all
    processes: FP8 rounds differently after each update, and this noise hides smaller changes of log-probabilities."""
    # torchao is optional
    layers = [module for module in model.modules() if type(module).__name__ == "Float8Linear"]
    for layer in layers:
        layer.forward = partial(_plain, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _plain(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight
    if gathered := getattr(layer, _SHARD, None):
        # gathered again, since fsdp2 has rounded it
        shard, group = gathered
        whole = shard.new_empty(weight.shape, dtype=weight.dtype)
        dist.all_gather_into_tensor(whole, shard.to(weight.dtype), group=group)
        weight = whole
    return nn.functional.linear(x, weight, layer.bias)
