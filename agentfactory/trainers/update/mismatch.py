"""Mismatch between trainer and server: loss weights that correct it (importance sampling), and its measurement."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from agentfactory.rollout.text.token_roles import ROLES
from agentfactory.rollout.token_row import Row
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import MismatchConfig
from agentfactory.trainers.update.losses import Flags, PerToken, RowNumbers, over_sequence


def mismatch_weights(config: MismatchConfig, log_ratio: PerToken, sequence: RowNumbers) -> tuple[PerToken, Flags]:
    """Return weights of the policy's terms that correct the difference between the server's sampling probabilities and
    the trainer's, and whether a token's ratio is truncated or masked. `log_ratio` = proximal - behaviour; the weights
    carry no gradient. With w = exp(log_ratio), and W its product over the sequence:

    token_truncate: min(w, high) (TIS: Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; Ionides, 2008). token_mask: w, but 0 outside [low, high] (IcePop: Ling Team, 2025, arXiv:2510.18855).
    sequence_truncate, sequence_mask: the same with W for all tokens of a sequence (Liu et al., 2025, "When speed kills
    stability: demystifying RL collapse from the training-inference mismatch"). geometric_mask: 1, but 0 for sequences
    where W^(1 / length) is outside [low, high] (the same authors, part 3): its bound does not tighten with the length,
    and should be close to 1, such as 0.99 and 1.01.
    """
    log_ratio = log_ratio.detach()
    if config.correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if not config.correction.startswith("token"):
        log_ratio = over_sequence(log_ratio, sequence, mean=config.correction == "geometric_mask")
    ratio, bounds = log_ratio.exp(), config.options
    if config.correction.endswith("truncate"):
        return ratio.clamp(max=bounds.high), ratio > bounds.high
    limited = (ratio < bounds.low) | (ratio > bounds.high)
    kept = torch.ones_like(ratio) if config.correction == "geometric_mask" else ratio
    return kept.where(~limited, 0.0), limited


def mismatch_kl(trainer: PerToken, server: PerToken) -> PerToken:
    """Return the k3 estimate of KL(server || trainer) from tokens that the server sampled (Schulman, 2020,
    "Approximating KL divergence"): exp(d) - 1 - d with d = trainer - server. Never negative."""
    difference = trainer - server
    return difference.exp() - 1 - difference


def mismatch_by_kind(
    rows: Sequence[TrainingRow],
    sources: Sequence[Row],
    proximal: Sequence[np.ndarray],
    age: Callable[[str], int] | None = None,
) -> dict[str, float]:
    """Return means of |trainer - server| log-probability in nats, over the tokens of each role (`mismatch/format`,
    ...) and of each age in versions (`mismatch/age/2`, ...). The format shows a drift long before samples do.

    `sources` are the rollout's rows from which `rows` were made, `proximal` the trainer's log-probabilities of their
    targets. `age` returns the age of the weights with a given label; without it there are no ages."""
    gaps: dict[str, list[np.ndarray]] = defaultdict(list)
    for row, source, scored in zip(rows, sources, proximal, strict=True):
        gap = np.abs(np.asarray(scored) - row.streams["behaviour"])
        targets = row.targets
        letters = np.frombuffer(source.roles.ljust(len(row.token_ids)).encode("ascii"), dtype=np.uint8)[targets]
        for name, letter in ROLES.items():
            gaps[f"mismatch/{name}"].append(gap[letters == ord(letter)])
        if age is not None:
            for span in source.versions:
                within = (targets >= span.start) & (targets < span.end)
                gaps[f"mismatch/age/{age(span.version)}"].append(gap[within])
    joined = {name: np.concatenate(parts) for name, parts in gaps.items()}
    return {name: float(values.mean()) for name, values in sorted(joined.items()) if values.size}
