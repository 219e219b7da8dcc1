"""Per-token losses. Each returns one term per trained token, unweighted: callers sum weight x term over all tokens of
all processes and divide by the batch's global normaliser."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def negative_log_likelihood(logprob: Float[Tensor, "targets"]) -> Float[Tensor, "targets"]:
    """-log pi(token | context), in nats."""
    return -logprob


def clipped_policy_loss(
    logprob: Float[Tensor, "targets"],
    proximal: Float[Tensor, "targets"],
    advantage: Float[Tensor, "targets"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "targets"], Bool[Tensor, "targets"]]:
    """The clipped surrogate (Schulman et al., 2017, PPO, arXiv:1707.06347, equation 7), negated, with separate bounds
    (Yu et al., 2025, DAPO, arXiv:2503.14476, equation 10), and where it is clipped:

        -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A),  ratio = exp(logprob - proximal)

    `proximal` are the trainer's own log-probabilities at the start of the update, never the server's.
    """
    ratio = (logprob - proximal).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    outside = ((ratio < 1 - clip_low) & (advantage < 0)) | ((ratio > 1 + clip_high) & (advantage > 0))
    return -torch.min(ratio * advantage, clipped * advantage), outside


def mismatch_kl(trainer: Float[Tensor, "targets"], server: Float[Tensor, "targets"]) -> Float[Tensor, "targets"]:
    """The k3 estimate of KL(server || trainer) from tokens that the server sampled (Schulman, 2020, "Approximating KL
    divergence"): exp(d) - 1 - d with d = trainer - server. Never negative."""
    difference = trainer - server
    return difference.exp() - 1 - difference
