"""Linear layers, also with an adapter, and norms, as one autograd function each. On a GPU, launching the operators of a
small network takes longer than their work; autocast and peft add several to each layer. And less is kept for the
backward pass: a norm's result is computed again from its inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

_kept: list[dict[int, tuple[Tensor, Tensor]]] = []
"""Identity of a weight -> the weight, so that its identity is not another's, and its copy in another precision."""

_COMPILED = "is_compiled_by_torch"
"""Attribute of layers that `use_ours` leaves alone."""


@contextmanager
def weights_kept(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the weights of linear layers to `dtype` once for this context, in which none may change, and not in each
    forward pass and recomputation. fsdp2 gathers them in `dtype`."""
    linear = {id(w): w for module in model.modules() if type(module) is nn.Linear for w in module.parameters()}
    plain = (weight for weight in linear.values() if not isinstance(weight, DTensor))
    weights: list[Tensor] = [weight for weight in plain if weight.dtype == torch.float32 != dtype]
    copies = [torch.empty_like(weight, dtype=dtype, requires_grad=False) for weight in weights]
    if weights:
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
    _kept.append({id(weight): (weight, copy) for weight, copy in zip(weights, copies, strict=True)})
    try:
        yield
    finally:
        _kept.pop()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`; call it where no gradient is recorded."""
    kept = _kept[-1].get(id(weight)) if _kept else None
    return weight.to(dtype) if kept is None or weight.dtype == dtype else kept[1]


def use_ours(model: nn.Module) -> None:
    """Replace the forward passes of torch's linear layers, of peft's plain LoRA on them, and of Llama's RMS norm, which
    most families copy. Results differ only by rounding below float32. What torch compiles stays as it is."""
    compiled = {part for layer in model.modules() if hasattr(layer, _COMPILED) for part in layer.modules()}
    for module in model.modules():
        if "forward" in vars(module) or module in compiled:
            # ours, or liger's
            continue
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, module.forward)  # type: ignore[method-assign]
        elif type(getattr(module, "base_layer", None)) is nn.Linear and getattr(module, "lora_variant", None) == {}:
            module.forward = partial(_adapted, module, module.forward)
        elif _same_code(type(module).forward, LlamaRMSNorm.forward):
            module.forward = partial(_norm, module, module.forward)


def use_torchs(layer: nn.Module) -> None:
    """Undo `use_ours` in a layer: torch.compile would compile each one by itself, and stop at its limit."""
    setattr(layer, _COMPILED, True)
    for module in layer.modules():
        if isinstance(vars(module).get("forward"), partial):
            del module.forward


def _same_code(one: Any, other: Any) -> bool:
    codes = [getattr(function, "__code__", None) for function in (one, other)]
    parts = [(code.co_code, code.co_consts, code.co_names) if code is not None else None for code in codes]
    return parts[0] == parts[1]


def precision(inputs: Tensor, *weights: Tensor) -> torch.dtype | None:
    """Return the precision of a layer's forward pass: autocast's, or the one that all share; None if there is none, or
    torch.compile traces the layer, which fuses more."""
    kind, dtypes = inputs.device.type, {inputs.dtype, *(weight.dtype for weight in weights)}
    if torch.compiler.is_compiling():
        return None
    # autocast leaves float64 alone
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    return inputs.dtype if len(dtypes) == 1 else None


def _rows(inputs: Float[Tensor, "*batch in"], dtype: torch.dtype) -> Float[Tensor, "rows in"]:
    """Return the inputs in `dtype`; the result of another layer keeps its cast for further ones."""
    if inputs.dtype == dtype or inputs.grad_fn is None:
        # without a cast, a view of the tensor, which would keep itself
        return inputs.to(dtype).reshape(-1, inputs.shape[-1])
    key = inputs._version, dtype, torch.is_grad_enabled()
    made: Any = getattr(inputs, "_as_rows", None)
    if made is None or made[0] != key:
        made = key, inputs.to(dtype).reshape(-1, inputs.shape[-1])
        inputs._as_rows = made  # type: ignore[attr-defined]
    found: Tensor = made[1]
    return found


# ---- linear layers


def _linear(layer: nn.Linear, plain: Callable[..., Tensor], input: Tensor) -> Tensor:  # torch's own name
    if (dtype := precision(input, layer.weight)) is None:
        return plain(input)
    return _by_rows(input, dtype, layer.weight, layer.bias)


def _adapted(layer: Any, plain: Callable[..., Tensor], inputs: Tensor, *further: Any, **options: Any) -> Tensor:
    name, base = layer.active_adapters[0], layer.base_layer
    # peft's other ways: none in use, a merged one, several, one with dropout, DoRA and the like
    ours = name in layer.lora_A and isinstance(layer.lora_dropout[name], nn.Identity) and not layer.lora_variant
    ours = ours and len(layer.active_adapters) == 1 and not (layer.disable_adapters or layer.merged)
    if ours and not (further or options) and not layer.lora_bias[name]:
        factors = layer.lora_A[name].weight, layer.lora_B[name].weight
        if (dtype := precision(inputs, base.weight, *factors)) is not None:
            return _by_rows(inputs, dtype, base.weight, base.bias, *factors, layer.scaling[name])
    return plain(inputs, *further, **options)


def _by_rows(inputs: Float[Tensor, "*batch in"], dtype: torch.dtype, *weights: Any) -> Float[Tensor, "*batch out"]:
    # views outside the function, because networks may change its result in place
    found: Tensor = _Linear.apply(_rows(inputs, dtype), *weights)
    return found.view(*inputs.shape[:-1], found.shape[-1])


class _Linear(torch.autograd.Function):
    """rows weight^T + bias + scale (rows down^T) up^T, in the precision of `rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Float[Tensor, "rows in"],
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, "out"] | None,
        down: Float[Tensor, "rank in"] | None = None,
        up: Float[Tensor, "out rank"] | None = None,
        scale: float = 1.0,
    ) -> Float[Tensor, "rows out"]:
        own, low, precise = cast(weight, rows.dtype), None, weight.dtype
        found = nn.functional.linear(rows, own, None if bias is None else cast(bias, rows.dtype))
        if down is not None and up is not None:
            precise = down.dtype
            down, up = cast(down, rows.dtype), cast(up, rows.dtype)
            low = nn.functional.linear(rows, down)
            found.addmm_(low, up.T, alpha=scale)
        ctx.save_for_backward(rows, low)
        # not as saved tensors, of which checkpointing makes an alias each
        ctx.weights, ctx.scale, ctx.precise = (own, down, up), scale, precise
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "rows out"]) -> tuple[Tensor | None, ...]:
        (rows, low), (weight, down, up) = ctx.saved_tensors, ctx.weights
        wanted = ctx.needs_input_grad
        back, of_down, of_up = grad @ weight if wanted[0] else None, None, None
        if low is not None:
            thin = grad @ up
            of_down = _gradient(thin, rows, ctx.precise).mul_(ctx.scale) if wanted[3] else None
            of_up = _gradient(grad, low, ctx.precise).mul_(ctx.scale) if wanted[4] else None
            back = back if back is None else back.addmm_(thin, down, alpha=ctx.scale)
        of_weight = _gradient(grad, rows, ctx.precise) if wanted[1] else None
        of_bias = grad.sum(0, dtype=ctx.precise) if wanted[2] else None
        return back, of_weight, of_bias, of_down, of_up, None


def _gradient(grad: Float[Tensor, "rows out"], rows: Float[Tensor, "rows in"], dtype: torch.dtype) -> Tensor:
    """Return grad^T rows, on a GPU added up and returned in the weight's `dtype`."""
    if grad.is_cuda and grad.dtype != dtype:
        return torch.mm(grad.T, rows, out_dtype=dtype)
    return grad.T @ rows


# ---- norms


def _norm(layer: Any, plain: Callable[..., Tensor], inputs: Tensor) -> Tensor:
    # in float64, transformers' own rounds to float32 in between
    if torch.compiler.is_compiling() or inputs.dtype == torch.float64:
        return plain(inputs)
    return _Norm.apply(inputs, layer.weight, layer.variance_epsilon)


class _Norm(torch.autograd.Function):
    """weight * inputs / sqrt(mean of inputs^2 + epsilon) (Zhang and Sennrich, 2019, arXiv:1910.07467), in float32."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Float[Tensor, "*batch width"], weight: Float[Tensor, "width"], epsilon: float
    ) -> Float[Tensor, "*batch width"]:
        inverse = inputs.float().square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(inputs, weight, inverse)
        return (inputs * inverse).mul_(weight).to(torch.result_type(inputs, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "*batch width"]) -> tuple[Tensor | None, ...]:
        inputs, weight, inverse = ctx.saved_tensors
        unit = inputs * inverse
        of_weight = (grad * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        back = grad.float() * weight
        share = (back * unit).mean(-1, keepdim=True)
        return back.addcmul_(unit, share, value=-1).mul_(inverse), of_weight, None
