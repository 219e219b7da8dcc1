"""One step of reinforcement learning on a batch: the optimiser updates of policy and critic, and their metrics."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from agentfactory.rollout.text.token_roles import ROLES
from agentfactory.rollout.token_row import Row
from agentfactory.trainers.batches.batch import Batch, MicroBatch, TrainingRow
from agentfactory.trainers.config import MismatchConfig, TrainRecipe
from agentfactory.trainers.teachers.teacher import is_graded
from agentfactory.trainers.update import losses
from agentfactory.trainers.update.learner import Learner, Targets, Terms, Update


@dataclass(frozen=True)
class PolicyUpdate:
    updates: list[Update]
    before: list[dict[str, Tensor]]
    """Streams from before the first update, along the targets of each micro-batch: `proximal` (log-probabilities), and
    `divergence` from the teacher (NaN: not graded), if there is one. Empty if only the critic learned."""


def update_policy(learner: Learner, batch: Batch, recipe: TrainRecipe, critic_only: bool = False) -> PolicyUpdate:
    """Perform `updates_per_batch` optimiser updates, each on the whole batch (PPO's epochs). The proximal
    log-probabilities are those of the first update's own forward pass."""
    train = recipe.train
    config, teacher = train.loss, recipe.teacher
    policy_loss = losses.PolicyLoss(config)
    before: list[dict[str, Tensor]] = []

    def loss(
        index: int, part: MicroBatch, logprob: Targets, entropy: Targets, divergence: Targets | None = None
    ) -> Terms:
        first = index == len(before)
        if first:
            before.append({"proximal": logprob.detach()})
        proximal = before[index]["proximal"]
        streams = part.streams
        weight = streams["weight"]
        # real tokens have weights above 0; tokens that only keep a process in step do not count
        real = weight > 0
        gap = torch.where(real, proximal - streams["behaviour"], 0.0)
        advantage = streams["advantage"]
        graded = real & is_graded(streams)
        if teacher is not None and divergence is None:
            # on average the gradient of -KL(policy || teacher), from the sampled token alone
            divergence = torch.where(graded, proximal - streams["teacher"], 0.0)
            advantage = advantage - teacher.coefficient * divergence
            if "most" in streams:
                advantage = advantage.clamp(streams["least"], streams["most"])
        known = {"proximal": proximal, "behaviour": streams["behaviour"], "sequence": part.sequence}
        terms, clipped = policy_loss(logprob=logprob, advantage=advantage, **known)
        correction, corrected = mismatch_weights(config.mismatch, gap, part.sequence)
        terms = terms * correction
        mixed = real & (streams["mixed"] > 0)
        sums = {
            "entropy": total(entropy, real),
            "clipped": total(clipped, real),
            "corrected": total(corrected, real),
            "mismatch": gap.abs().sum(),
            # KL(server || trainer)
            "mismatch_kl": losses.kl("k3", torch.zeros_like(gap), gap).sum(),
            "mixed": mixed.sum(),
            "mismatch_mixed": total(gap.abs(), mixed),
        }
        if teacher is not None and divergence is not None:
            if not teacher.is_sampled:
                terms = terms + teacher.coefficient * divergence
            if first:
                before[index]["divergence"] = divergence.detach().where(graded, torch.nan)
            sums |= {"teacher_kl": total(divergence, graded), "graded": graded.sum()}
        if config.behaviour_kl:
            held = losses.behaviour_kl(logprob, streams["behaviour"])
            terms = terms + config.behaviour_kl * held
            sums["behaviour_kl"] = total(held, real)
        if config.kl.coefficient and config.kl.place == "loss":
            distance = losses.kl(config.kl.estimator, logprob, streams["reference"])
            terms = terms + config.kl.coefficient * distance
            sums["kl"] = total(distance, real)
        if config.entropy_bonus:
            terms = terms - config.entropy_bonus * entropy
        return Terms(loss=(weight * terms).sum(), sums=sums, maxima={"mismatch": gap.abs().max()})

    def critic_loss(part: MicroBatch, values: Targets) -> Terms:
        streams = part.streams
        terms, clipped = losses.value_loss(values, streams["value"], streams["return"], train.critic.value_clip)
        real = streams["weight"] > 0
        sums = {"value_loss": total(terms, real), "value_clipped": total(clipped, real)}
        return Terms(loss=(streams["weight"] * terms).sum(), sums=sums)

    terms = None if critic_only else loss, critic_loss if learner.has_critic else None
    return PolicyUpdate([learner.update(batch, *terms) for _ in range(train.updates_per_batch)], before)


def total(values: Targets, chosen: losses.Flags) -> Float[Tensor, ""]:
    """Return the sum of the chosen values. Unlike an index, it does not wait for a GPU."""
    return values.detach().where(chosen, 0.0).sum()


def update_metrics(updates: list[Update], batch: Batch) -> dict[str, float]:
    """Return means over a step's updates; entropy and mismatch are those before the first."""
    count, first = len(updates), updates[0]
    metrics = {name: sum(getattr(update, name) for update in updates) / count for name in ("loss", "grad_norm")}
    for name, key in _MEANS.items():
        if key in first.sums:
            metrics[name] = sum(update.sums[key] for update in updates) / count / batch.tokens
    metrics |= {name: first.sums[key] / batch.tokens for name, key in _FIRST.items() if key in first.sums}
    if "mismatch" in first.maxima:
        metrics["mismatch/max"] = first.maxima["mismatch"]
    if mixed := first.sums.get("mixed"):
        metrics |= {"mismatch/mixed": first.sums["mismatch_mixed"] / mixed, "mixed_tokens": mixed / batch.tokens}
    if "teacher_kl" in first.sums:
        metrics["teacher/kl"] = first.sums["teacher_kl"] / max(1.0, first.sums["graded"])
    return metrics


_MEANS = {"clip_fraction": "clipped", "critic/loss": "value_loss", "critic/clip_fraction": "value_clipped"}
"""Metric -> sum over the tokens of each update."""
_FIRST = {
    **{"entropy": "entropy", "kl": "kl", "mismatch/behaviour_kl": "behaviour_kl"},
    **{"mismatch/mean": "mismatch", "mismatch/kl": "mismatch_kl", "mismatch/corrected": "corrected"},
}
"""Metric -> sum over the tokens of the first update."""


# ---- mismatch between trainer and server


def mismatch_weights(
    config: MismatchConfig, log_ratio: losses.PerToken, sequence: losses.RowNumbers
) -> tuple[losses.PerToken, losses.Flags]:
    """Return weights of the policy's terms that correct the difference between the server's sampling probabilities and
    the trainer's, and whether a token's ratio is truncated or masked. `log_ratio` = proximal - behaviour; the weights
    carry no gradient. With w = exp(log_ratio), and W its product over the sequence:

    token_truncate: min(w, high) (TIS: Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; Ionides, 2008). token_mask: w, but 0 outside [low, high] (IcePop: Ling Team, 2025, arXiv:2510.18855).
    sequence_truncate, sequence_mask: the same with W for all tokens of a sequence (Liu et al., 2025, "When speed kills
    stability: demystifying RL collapse from the training-inference mismatch"). geometric_mask: 1, but 0 for sequences
    where W^(1 / length) is outside [low, high] (the same authors, part 3): its bound does not tighten with the length,
    and should be close to 1, such as 0.99 and 1.01."""
    log_ratio = log_ratio.detach()
    if config.correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    if not config.correction.startswith("token"):
        log_ratio = losses.over_sequence(log_ratio, sequence, mean=config.correction == "geometric_mask")
    ratio, bounds = log_ratio.exp(), config.options
    if config.correction.endswith("truncate"):
        return ratio.clamp(max=bounds.high), ratio > bounds.high
    limited = (ratio < bounds.low) | (ratio > bounds.high)
    kept = torch.ones_like(ratio) if config.correction == "geometric_mask" else ratio
    return kept.where(~limited, 0.0), limited


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
        gap, targets = np.abs(np.asarray(scored) - row.streams["behaviour"]), row.targets
        letters = np.frombuffer(source.roles.ljust(len(row.token_ids)).encode("ascii"), dtype=np.uint8)[targets]
        for name, letter in ROLES.items():
            gaps[f"mismatch/{name}"].append(gap[letters == ord(letter)])
        if age is not None:
            for span in source.versions:
                within = (targets >= span.start) & (targets < span.end)
                gaps[f"mismatch/age/{age(span.version)}"].append(gap[within])
    joined = {name: np.concatenate(parts) for name, parts in gaps.items()}
    return {name: float(values.mean()) for name, values in sorted(joined.items()) if values.size}
