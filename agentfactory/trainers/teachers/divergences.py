"""Divergences between policy and teacher over the vocabulary, one value per token.

With p the policy's and q the teacher's distribution, both from logits that are divided by the sampling temperature:

reverse_kl: KL(p || q) (Gu et al., 2024, MiniLLM, arXiv:2306.08543).
forward_kl: KL(q || p) (Hinton et al., 2015, arXiv:1503.02531).
jensen_shannon: beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p (Agarwal et al., 2024, GKD,
arXiv:2306.13649, equation 1).

TRL's GKDTrainer has the three as beta = 1, 0 and between.

Over the teacher's k most likely tokens, the rest of the vocabulary counts as one more token, with the remaining mass of
p and q. This is a lower bound of the divergence, with equality if k is the vocabulary.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Kind = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
Logits = Float[Tensor, "tokens vocabulary"]
Top = Float[Tensor, "tokens k"]


def divergence(kind: Kind, policy: Logits, teacher: Logits, beta: float = 0.5) -> Float[Tensor, "tokens"]:
    """Return the divergence of each token's distributions in nats, over the rows of the vocabulary that both have."""
    shared = min(policy.shape[-1], teacher.shape[-1])
    return _between(kind, policy[:, :shared].log_softmax(-1), teacher[:, :shared].log_softmax(-1), beta)


def top_k_divergence(
    kind: Kind, policy: Logits, tokens: Int[Tensor, "tokens k"], teacher: Top, beta: float = 0.5
) -> Float[Tensor, "tokens"]:
    """Return the divergence of each token's distributions, in nats, over the given tokens and the rest.

    `teacher` are the teacher's log-probabilities of `tokens`. A token outside the policy's vocabulary, such as -1,
    belongs to the rest; the divergence of a line without others is 0. The teacher's rest is at least the rounding of
    its dtype."""
    width = policy.shape[-1]
    known = (tokens >= 0) & (tokens < width)
    # one of the line's tokens more than once changes nothing
    places = torch.where(known, tokens, torch.where(known, tokens, 0).amax(-1, keepdim=True))
    total = policy.logsumexp(-1, keepdim=True)
    finite = torch.finfo(policy.dtype).min / 4
    rest = policy.scatter(-1, places, finite).logsumexp(-1, keepdim=True) - total
    teacher = teacher.to(policy.dtype)
    mass = torch.where(known, teacher.exp(), 0.0).sum(-1, keepdim=True)
    others = (1.0 - mass).clamp(min=torch.finfo(torch.float32).eps).log()
    some = known.any(-1, keepdim=True)
    used = torch.cat([known, some & (known.sum(-1, keepdim=True) < width)], -1)
    # two equal probabilities of nearly 0 add nothing
    none = torch.full_like(used, -1e3, dtype=policy.dtype)
    p = torch.where(used, torch.cat([policy.gather(-1, places) - total, rest], -1), none)
    q = torch.where(used, torch.cat([teacher, others], -1), none)
    return _between(kind, p, q, beta)


def top_k(logits: Logits, k: int) -> Float[Tensor, "tokens 2 k"]:
    """Return the k most likely tokens of each line, as floats, and their log-probabilities; -1 and 0 if there are
    fewer."""
    found = logits.topk(min(k, logits.shape[-1]))
    pair = torch.stack([found.indices.to(logits.dtype), found.values - logits.logsumexp(-1, keepdim=True)], -2)
    missing = k - pair.shape[-1]
    filled: Tensor = torch.cat([pair, pair.new_tensor([[-1.0], [0.0]]).expand(len(pair), 2, missing)], -1)
    return filled


def _between(kind: Kind, p: Tensor, q: Tensor, beta: float) -> Float[Tensor, "tokens"]:
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
