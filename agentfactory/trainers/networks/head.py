"""Scores of tokens by a head, in chunks: the backward pass computes a chunk's logits again, unless the head is frozen;
the gradient of the hidden states is then known in the forward pass but for a factor per token."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentfactory.trainers.networks.layers import cast

_SUMMED = 2**13
"""Products that are summed at a time, in float32."""


class Scores(torch.autograd.Function):
    """The log-probability of each label, and the entropy in nats, without a gradient, in float32 at least. The gradient
    of the logits is g (one-hot - p) / temperature, where g is that of the log-probability, and p = softmax(logits)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "targets width"],
        weight: Float[Tensor, "vocabulary width"],
        labels: Int[Tensor, "targets"],
        temperature: float,
        adjust: Callable[[Float[Tensor, "chunk vocabulary"]], Float[Tensor, "chunk vocabulary"]],
        size: int,
    ) -> tuple[Float[Tensor, "targets"], Float[Tensor, "targets"]]:
        """`adjust` divides logits by `temperature`, and adds constants; a chunk has `size` targets."""
        ctx.weight, ctx.adjust, ctx.size, ctx.scale = cast(weight, hidden.dtype), adjust, size, 1 / temperature
        ctx.precise, ctx.is_frozen = weight.dtype, ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        found: list[tuple[Tensor, ...]] = []
        # autocast would multiply in its own precision
        with torch.autocast(hidden.device.type, enabled=False):
            for part, rows, wide, shares in _chunks(hidden, len(weight), size, 2):
                chosen, logits = labels[part, None], adjust(hidden[part] @ ctx.weight.T)
                peak = logits.amax(-1, keepdim=True).to(wide.dtype)
                _minus(logits, peak, out=wide)
                torch.exp(wide, out=shares)
                total = shares.sum(-1, keepdim=True)
                log_total = total.log()
                logprob = wide.gather(-1, chosen) - log_total
                products = zip(shares.split(_SUMMED, -1), wide.split(_SUMMED, -1), strict=True)
                mean = torch.stack([torch.einsum("cv,cv->c", *pair) for pair in products]).sum(0)[:, None] / total
                found.append((logprob[:, 0], (log_total - mean)[:, 0], log_total + peak))
                if ctx.is_frozen:
                    shares = _rounded(torch.div, shares, total, out=logits).to(hidden.dtype)
                    # on a CPU, scatter_ would take a copy in float32
                    shares[rows, labels[part]] = logprob[:, 0].expm1().to(shares.dtype)
                    found[-1] = (*found[-1], shares @ ctx.weight)
        logprob, entropy, *rest = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(*(rest[1:] or (hidden, labels, logprob, *rest)))
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "targets"], _: Any) -> tuple[Tensor | None, ...]:
        grad = grad[:, None] * ctx.scale
        if ctx.is_frozen:
            return -grad * ctx.saved_tensors[0], None, None, None, None, None
        hidden, labels, logprob, log_total = ctx.saved_tensors
        # |g| p is one exponential; the smaller factors get the sign
        sign, size = -grad.sign().to(hidden.dtype), grad.abs()
        shift, own = log_total - size.log(), (size * logprob[:, None].expm1()).to(hidden.dtype)
        back, of_weight = torch.empty_like(hidden), torch.zeros_like(ctx.weight, dtype=ctx.precise)
        for part, rows, wide in _chunks(hidden, len(ctx.weight), ctx.size, 1):
            logits = ctx.adjust(hidden[part] @ ctx.weight.T)
            _minus(logits, shift[part], out=wide)
            shares = _rounded(torch.exp, wide, out=logits).to(hidden.dtype)
            shares[rows, labels[part]] = own[part, 0]
            torch.mul(shares @ ctx.weight, sign[part], out=back[part])
            of_weight += shares.T @ (hidden[part] * sign[part])
        return back, of_weight, None, None, None, None


def _in_one(one: Tensor, other: Tensor) -> bool:
    """Return whether one operator can read `one` and write `other`: on a CPU, torch copies other precisions."""
    return one.dtype == other.dtype or one.is_cuda


def _minus(logits: Tensor, shift: Tensor, out: Tensor) -> None:
    if _in_one(logits, out):
        torch.sub(logits, shift, out=out)
    else:
        out.copy_(logits).sub_(shift)


def _rounded(function: Callable[..., Tensor], wide: Tensor, *others: Tensor, out: Tensor) -> Tensor:
    """Return function(wide, *others) in the memory and the precision of `out`. What `wide` held may be lost."""
    if _in_one(wide, out):
        return function(wide, *others, out=out)
    return out.copy_(function(wide, *others, out=wide))


def _chunks(hidden: Tensor, vocabulary: int, size: int, buffers: int) -> Iterator[tuple[Any, ...]]:
    """Yield the slices of the targets, each with its row numbers and the same memory: new blocks are slow on a CPU."""
    shape, dtype = (min(size, len(hidden)), vocabulary), torch.promote_types(hidden.dtype, torch.float32)
    rows = torch.arange(shape[0], device=hidden.device)
    made = [torch.empty(shape, dtype=dtype, device=hidden.device) for _ in range(buffers)]
    for start in range(0, max(1, len(hidden)), size):
        part = slice(start, min(start + size, len(hidden)))
        yield part, *(buffer[: part.stop - start] for buffer in (rows, *made))
