"""Divergences between policy and teacher over the vocabulary, one value per token.

With p the policy's and q the teacher's distribution, both from logits that are divided by the sampling temperature:

reverse_kl: KL(p || q) (Gu et al., 2024, MiniLLM, arXiv:2306.08543).
forward_kl: KL(q || p) (Hinton et al., 2015, arXiv:1503.02531).
jensen_shannon: beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p (Agarwal et al., 2024, GKD,
arXiv:2306.13649, equation 1).

TRL's GKDTrainer has the three as beta = 1, 0 and between.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Logits = Float[Tensor, "tokens vocabulary"]


def divergence(
    kind: Literal["reverse_kl", "forward_kl", "jensen_shannon"], policy: Logits, teacher: Logits, beta: float = 0.5
) -> Float[Tensor, "tokens"]:
    """Return the divergence of each token's distributions, in nats. Rows of the vocabulary that only one of the two has
    are left out: they belong to no token (see `tokenizers`)."""
    shared = min(policy.shape[-1], teacher.shape[-1])
    p, q = policy[:, :shared].log_softmax(-1), teacher[:, :shared].log_softmax(-1)
    match kind:
        case "reverse_kl":
            return _kl(p, q)
        case "forward_kl":
            return _kl(q, p)
        case "jensen_shannon":
            mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
            return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _kl(first: Logits, second: Logits) -> Float[Tensor, "tokens"]:
    """KL(first || second) of log-probabilities."""
    return (first.exp() * (first - second)).sum(-1)
