"""The losses of the Tinker API, each a sum over all tokens: never a mean, and no token is left out as padding."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from agentfactory.trainers.update.losses import RowNumbers


def terms(
    loss: str, logprob: Tensor, inputs: Mapping[str, Tensor], sequence: RowNumbers, options: Mapping[str, float]
) -> Tensor:
    """Return a loss's term of each token, with p the policy's log-probability of a target, q the one it was sampled
    with, A its advantage, and r = exp(p - q), which is itself bounded by `low` and `high`.

    cross_entropy: -w p, for one target or several per token.
    importance_sampling: -r A.
    ppo: -min(r A, clamp(r, low, high) A) (Schulman et al., 2017, arXiv:1707.06347, equation 7).
    cispo: -sg[clamp(r, low, high)] p A (MiniMax, 2025, arXiv:2506.13585, section 3.1).
    dro: -(p A - beta / 2 (p - q)^2) (Richemond et al., 2024, arXiv:2405.19107, with the advantage in place of r - V).
    gspo: ppo with s = exp(mean of p - q over the datum's tokens in sequence_ratio_mask) instead of r, as sg[s] r /
    sg[r], so that tokens keep their own advantages (Zheng et al., 2025, arXiv:2507.18071, equation 14)."""
    if loss == "cross_entropy":
        return -inputs["weights"] * logprob
    log_ratio, advantage = logprob - inputs["logprobs"], inputs["advantages"]
    if loss == "dro":
        return options["beta"] / 2 * log_ratio.square() - logprob * advantage
    if loss == "gspo":
        mask, detached = inputs["sequence_ratio_mask"], log_ratio.detach()
        sums = mask.new_zeros(int(sequence.max()) + 1, 2)
        sums.index_add_(0, sequence, torch.stack([mask * detached, mask], 1))
        mean = sums[:, 0] / sums[:, 1].clamp(min=1.0)
        log_ratio = mean[sequence] + log_ratio - detached
    ratio = log_ratio.exp()
    if loss == "importance_sampling":
        return -ratio * advantage
    bounded = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    if loss == "cispo":
        return -bounded.detach() * logprob * advantage
    return -torch.min(ratio * advantage, bounded * advantage)


class Arguments(NamedTuple):
    """The inputs of a loss beside target_tokens, and its options, with their defaults (None: required)."""

    inputs: dict[str, float | None]
    options: dict[str, float] = {}


_SAMPLED: dict[str, float | None] = {"logprobs": None, "advantages": None}
# as in the hosted service's example of ppo
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Arguments({"weights": 1.0}),
    "importance_sampling": Arguments(_SAMPLED),
    **dict.fromkeys(("ppo", "cispo"), Arguments(_SAMPLED, _BOUNDS)),
    "dro": Arguments(_SAMPLED, {"beta": 0.05}),
    "gspo": Arguments({**_SAMPLED, "sequence_ratio_mask": None}, _BOUNDS),
}
REFUSED = {
    "stable_reinforce": "its formula is not published; use importance_sampling, ppo, cispo, dro or gspo",
    "custom": "losses run in the client here; pass a function to forward_backward_custom",
}
