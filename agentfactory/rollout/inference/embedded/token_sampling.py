"""Samples one token per row of logits."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor


class Sampling(Protocol):
    """Parameters that determine the sampled token of a row."""

    temperature: float
    generator: Random
    logit_bias: dict[int, float]


def sample(
    logits: Float[Tensor, "n vocabulary"], requests: Sequence[Sampling]
) -> tuple[list[int], Float[Tensor, "n vocabulary"]]:
    """Return one token per row, and all log-probabilities, after bias and temperature. `logits` may be overwritten.

    Inverts the cumulative distribution at one uniform number
    per token, drawn from the request's own generator, so that a result does not depend on the rest of the batch."""
    temperature = [r.temperature for r in requests]
    scaled = logits.float()
    biases = [(row, *bias) for row, request in enumerate(requests) for bias in request.logit_bias.items()]
    if biases:
        rows, biased, added = zip(*biases, strict=True)
        values = torch.tensor(added, dtype=scaled.dtype, device=logits.device)
        scaled[torch.tensor(rows, device=logits.device), torch.tensor(biased, device=logits.device)] += values
    if any(t not in (0.0, 1.0) for t in temperature):
        scaled = scaled / torch.tensor([t or 1.0 for t in temperature], device=logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, -1)
    if any(temperature):
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        uniform = torch.tensor([r.generator.random() if r.temperature else 0.0 for r in requests], dtype=torch.float64)
        target = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
        if not all(temperature):
            greedy = torch.tensor([t == 0.0 for t in temperature], device=logits.device)[:, None]
            tokens = torch.where(greedy, scaled.argmax(-1, keepdim=True), tokens)
    else:
        tokens = scaled.argmax(-1, keepdim=True)
    return tokens[:, 0].tolist(), logprobs
