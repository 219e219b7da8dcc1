"""Losses, one term per trained token.

Callers sum weight x term over all tokens of all processes and divide by the batch's global normaliser (`token_weights`
returns both), so that the result does not depend on micro-batches, packing and processes. The policy's log-probability
is compared with `proximal`, the trainer's at the start of the update, which clipping uses, and with `behaviour`, the
server's, whose mismatch with `proximal` is corrected by a weight; never with both in one ratio. `sequence` is the
number of a token's row; sums over a sequence are over the row's trained tokens."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extension import load_extension
from agentfactory.trainers.config import LossConfig

SMALLEST_COMPLEMENT = 1e-6
"""Lower bound of 1 - p: smaller values cannot be distinguished from 0 in float32."""

PerToken = Float[Tensor, "targets"]
Flags = Bool[Tensor, "targets"]
RowNumbers = Int[Tensor, "targets"]


def token_weights(
    lengths: Sequence[int], normaliser: Literal["token", "sequence", "sequence_sum", "constant"], limits: Sequence[int]
) -> tuple[list[float], float]:
    """Return the weight of each token of a chain, per chain, and the divisor of the sum over the batch.

    `lengths` are the trained tokens of each chain, in all its rows, and `limits` its source's max_total_tokens; n is
    the number of chains that have any.
    token: 1, and the sum of the lengths (Yu et al., 2025, DAPO, arXiv:2503.14476, equation 8).
    sequence: 1 / length, and n (Shao et al., 2024, GRPO, arXiv:2402.03300, equation 3).
    sequence_sum: 1, and n (Ahmadian et al., 2024, RLOO, arXiv:2402.14740: the log-probability of the whole chain).
    constant: the largest limit / limit, and n x the largest limit (Liu et al., 2025, Dr. GRPO, arXiv:2503.20783,
    section 3.2: sum / limit, mean over chains)."""
    chains = sum(1 for length in lengths if length)
    ones = [1.0] * len(lengths)
    match normaliser:
        case "token":
            return ones, float(sum(lengths))
        case "sequence":
            return [1.0 / length if length else 0.0 for length in lengths], float(chains)
        case "sequence_sum":
            return ones, float(chains)
        case "constant":
            most = max(limits, default=1)
            return [most / limit for limit in limits], float(chains * most)


def negative_log_likelihood(logprob: PerToken) -> PerToken:
    """-log pi(token | context), in nats."""
    return -logprob


def clip(
    logprob: PerToken,
    proximal: PerToken,
    advantage: PerToken,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[PerToken, Flags]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logprob - proximal): the surrogate of PPO
    (Schulman et al., 2017, arXiv:1707.06347, equation 7) with separate bounds (DAPO, arXiv:2503.14476, equation 10). If
    dual_clip is set, the value for A < 0 is at most -dual_clip A (Ye et al., 2020, arXiv:1912.09729, equation 5)."""
    return _clipped_surrogate((logprob - proximal).exp(), advantage, clip_low, clip_high, dual_clip)


def gspo(
    logprob: PerToken,
    proximal: PerToken,
    advantage: PerToken,
    sequence: RowNumbers,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[PerToken, Flags]:
    """`clip` with s = exp(mean of log r over the sequence) instead of r (Zheng et al., 2025, arXiv:2507.18071,
    equations 5 and 7), in the form of its equation 14, sg[s] pi / sg[pi]: the values are those of s, and each token has
    its own gradient: that of equation 5 if a sequence has one advantage; else the credit of turns stays separate."""
    log_ratio = logprob - proximal
    detached = log_ratio.detach()
    # equals the mean, but is differentiable in this token's log-probability
    ratio = (over_sequence(detached, sequence, mean=True) + (log_ratio - detached)).exp()
    return _clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip)


def cispo(logprob: PerToken, proximal: PerToken, advantage: PerToken, clip_high: float) -> tuple[PerToken, Flags]:
    """-sg[min(r, 1 + clip_high)] A log pi, whose gradient reaches every token (MiniMax, 2025, arXiv:2506.13585, section
    3.1; like the paper, without a lower bound)."""
    ratio, bound = (logprob - proximal).detach().exp(), 1 + clip_high
    return -ratio.clamp(max=bound) * advantage * logprob, ratio > bound


def sapo(logprob: PerToken, proximal: PerToken, advantage: PerToken) -> PerToken:
    """-A sigmoid(t (r - 1)) 4 / t, with t = 1 if A > 0, else 1.05 (Gao et al., 2025,
    arXiv:2511.20347): the slope in r is 1 at r = 1, and fades on both sides. Nothing is clipped."""
    positive, negative = logprob.new_tensor([1.0, 1.05])
    temperature = torch.where(advantage > 0, positive, negative)
    gate = torch.sigmoid(temperature * ((logprob - proximal).exp() - 1)) * 4 / temperature
    return -gate * advantage


def reinforce(logprob: PerToken, advantage: PerToken) -> PerToken:
    """-A log pi (Williams, 1992). Nothing is clipped."""
    return -advantage * logprob


POLICY_LOSSES: dict[str, Callable[..., Any]] = {loss.__name__: loss for loss in (clip, gspo, cispo, sapo, reinforce)}
"""`train.loss.policy` -> function. Its parameters are some of POLICY_INPUTS, and the fields of its options."""

POLICY_INPUTS = ("logprob", "proximal", "behaviour", "advantage", "sequence")
"""Inputs that a policy loss can take, per trained token: log-probabilities of the policy (the only ones with a
gradient), of the trainer before the update, and of the server; the advantage; the number of the row."""


class PolicyLoss:
    """`train.loss.policy`: one of POLICY_LOSSES, or the user's own `FILE.py:NAME`."""

    def __init__(self, config: LossConfig) -> None:
        """Raise SettingError if the function cannot be loaded or its parameters do not fit."""
        self._function = load_extension("train.loss.policy", config.policy, POLICY_LOSSES, POLICY_INPUTS, config)

    def __call__(self, **inputs: Tensor) -> tuple[PerToken, Flags]:
        """Return the term of each token, and whether a bound stops its update. `inputs` are the POLICY_INPUTS that the
        function takes. Raises SettingError if it returned something else."""
        found = self._function(**inputs)
        terms, clipped = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        logprob = inputs["logprob"]
        if clipped is None:
            clipped = torch.zeros_like(logprob, dtype=torch.bool)
        for name, value in {"terms": terms, "clipped": clipped}.items():
            if not isinstance(value, Tensor) or value.shape != logprob.shape:
                got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
                problem = f"{self._function.name} returned {got} as {name}, and there are {len(logprob)} tokens"
                raise SettingError("train.loss.policy", problem, "return one number per token, or (terms, clipped)")
        if not terms.requires_grad and logprob.requires_grad:
            problem = f"the terms of {self._function.name} have no gradient"
            raise SettingError("train.loss.policy", problem, "compute them from logprob, without detach() or no_grad()")
        if self._function.name and not bool(terms.isfinite().all()):
            problem = f"{self._function.name} returned terms that are not finite"
            raise SettingError("train.loss.policy", problem, "look for a division by 0, or a logarithm of 0")
        return terms, clipped.bool()


def _clipped_surrogate(
    ratio: PerToken, advantage: PerToken, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[PerToken, Flags]:
    low, high = 1 - clip_low, 1 + clip_high
    terms = -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    if dual_clip is not None:
        beyond = (ratio > dual_clip) & (advantage < 0)
        terms = torch.where(beyond, -dual_clip * advantage, terms)
        clipped = clipped | beyond
    return terms, clipped


def over_sequence(values: PerToken, sequence: RowNumbers, mean: bool = False) -> PerToken:
    """Return for each token the sum, or the mean, over the tokens of its sequence."""
    counts = torch.bincount(sequence)
    totals = values.new_zeros(len(counts)).index_add(0, sequence, values)
    return (totals / counts if mean else totals)[sequence]


def kl(estimator: Literal["k1", "k2", "k3"], logprob: PerToken, reference: PerToken) -> PerToken:
    """Estimate KL(policy || reference) from tokens of the policy (Schulman, 2020, "Approximating KL divergence").

    With d = logprob - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The mean of k1 and of k3 is the
    divergence, and k3 is never negative. In a loss, only the gradient matters. It is the gradient of log pi times:
    k1: 1, whose mean is 0, so it has no effect: use k1 only as a cost in the reward.
    k2: d, whose mean is the gradient of KL(policy || reference).
    k3: 1 - exp(-d), whose mean is the gradient of KL(reference || policy); it is at most 1 where the policy has become
    more certain than the reference, and unbounded where it has become less certain."""
    d = logprob - reference
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return (-d).exp() - 1 + d


def behaviour_kl(logprob: PerToken, behaviour: PerToken) -> PerToken:
    """Compute KL(policy || behaviour) of a binary choice: the sampled token, or any other. With p and q the policy's
    and the behaviour's probabilities of the sampled token:

    p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    This is the binary divergence of Qi et al., 2026, arXiv:2602.04879, in the other direction; it is at most the
    divergence over the vocabulary. Its gradient is p (logit p - logit q) times that of log p. It is strong where tokens
    that were almost certain no longer are, long before others are sampled in their place, and weak where the policy
    chooses among many. Value and gradient are 0 where the policy equals the one that sampled.

    Complements below 1e-6 count as 1e-6: float32 log-probabilities cannot distinguish smaller ones."""
    detached = logprob.detach()
    p, rest, other_rest = detached.exp(), _log_complement(detached), _log_complement(behaviour)
    gap = (detached - rest) - (behaviour - other_rest)
    value = p * gap + rest - other_rest
    # written out: where the bound on 1 - p applies, autograd's terms would not cancel as they should
    return value + p * gap * (logprob - detached)


def _log_complement(logprob: PerToken) -> PerToken:
    """log(1 - exp(logprob))."""
    return (-torch.expm1(logprob)).clamp(min=SMALLEST_COMPLEMENT).log()


def value_loss(value: PerToken, old_value: PerToken, returns: PerToken, clip: float | None) -> tuple[PerToken, Flags]:
    """Compute the critic's squared error, and whether clipping stops its update: max((V - R)^2, (V' - R)^2) / 2, where
    V' is V clipped to within `clip` of the value before the update, or (V - R)^2 / 2 for None (the value loss of
    OpenAI's PPO; Engstrom et al., 2020, arXiv:2005.12729, section 3)."""
    error = (value - returns).square()
    if clip is None:
        return error / 2, torch.zeros_like(value, dtype=torch.bool)
    change = value - old_value
    bounded = (old_value + change.clamp(-clip, clip) - returns).square()
    return torch.max(error, bounded) / 2, (change.abs() > clip) & (bounded > error)
