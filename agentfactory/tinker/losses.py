"""The losses of the Tinker API, each a sum over all tokens: never a mean, and no token is left out as padding.

With p the policy's log-probability of a target, q the one it was sampled with, A its advantage, and r = exp(p - q).
`low` and `high` bound r itself."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from agentfactory.trainers.update.losses import RowNumbers

Inputs = dict[str, Tensor]


def cross_entropy(logprob: Tensor, inputs: Inputs, sequence: RowNumbers) -> Tensor:
    """-w p, for one target or several per token."""
    return -inputs["weights"] * logprob


def importance_sampling(logprob: Tensor, inputs: Inputs, sequence: RowNumbers) -> Tensor:
    """-r A."""
    return -_ratio(logprob, inputs) * inputs["advantages"]


def ppo(logprob: Tensor, inputs: Inputs, sequence: RowNumbers, low: float, high: float) -> Tensor:
    """-min(r A, clamp(r, low, high) A) (Schulman et al., 2017, arXiv:1707.06347, equation 7)."""
    return _surrogate(_ratio(logprob, inputs), inputs["advantages"], low, high)


def cispo(logprob: Tensor, inputs: Inputs, sequence: RowNumbers, low: float, high: float) -> Tensor:
    """-sg[clamp(r, low, high)] p A (MiniMax, 2025, arXiv:2506.13585, section 3.1)."""
    return -_ratio(logprob, inputs).detach().clamp(low, high) * logprob * inputs["advantages"]


def dro(logprob: Tensor, inputs: Inputs, sequence: RowNumbers, beta: float) -> Tensor:
    """-(p A - beta / 2 (p - q)^2) (Richemond et al., 2024, arXiv:2405.19107, with the advantage in place of r - V)."""
    return beta / 2 * (logprob - inputs["logprobs"]).square() - logprob * inputs["advantages"]


def gspo(logprob: Tensor, inputs: Inputs, sequence: RowNumbers, low: float, high: float) -> Tensor:
    """ppo with s = exp(mean of p - q over the datum's tokens in sequence_ratio_mask) instead of r, as sg[s] r / sg[r],
    so that tokens keep their own advantages (Zheng et al., 2025, arXiv:2507.18071, equation 14)."""
    mask, log_ratio = inputs["sequence_ratio_mask"], logprob - inputs["logprobs"]
    detached = log_ratio.detach()
    sums = mask.new_zeros(int(sequence.max()) + 1, 2)
    sums.index_add_(0, sequence, torch.stack([mask * detached, mask], 1))
    mean = sums[:, 0] / sums[:, 1].clamp(min=1.0)
    return _surrogate((mean[sequence] + log_ratio - detached).exp(), inputs["advantages"], low, high)


def _ratio(logprob: Tensor, inputs: Inputs) -> Tensor:
    return (logprob - inputs["logprobs"]).exp()


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)


class Loss(NamedTuple):
    """A loss, its inputs beside target_tokens with their defaults (None: required), and its options: the API's name
    -> the parameter and its default."""

    terms: Callable[..., Tensor]
    inputs: dict[str, float | None]
    options: dict[str, tuple[str, float]] = {}


_SAMPLED: dict[str, float | None] = {"logprobs": None, "advantages": None}
# as in the hosted service's example of ppo
_BOUNDS = {"clip_low_threshold": ("low", 0.8), "clip_high_threshold": ("high", 1.2)}
LOSSES = {
    "cross_entropy": Loss(cross_entropy, {"weights": 1.0}),
    "importance_sampling": Loss(importance_sampling, _SAMPLED),
    "ppo": Loss(ppo, _SAMPLED, _BOUNDS),
    "cispo": Loss(cispo, _SAMPLED, _BOUNDS),
    "dro": Loss(dro, _SAMPLED, {"beta": ("beta", 0.05)}),
    "gspo": Loss(gspo, {**_SAMPLED, "sequence_ratio_mask": None}, _BOUNDS),
}
REFUSED = {
    "stable_reinforce": "its formula is not published; use importance_sampling, ppo, cispo, dro or gspo",
    "custom": "losses run in the client here; pass a function to forward_backward_custom",
}
