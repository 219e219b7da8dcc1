"""One step of reinforcement learning on a batch: the optimiser updates of policy and critic, and their metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentfactory.trainers.batches.batch import Batch, MicroBatch
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.teachers.graded_rows import is_graded
from agentfactory.trainers.update.learner import Learner, Targets, Terms, Update
from agentfactory.trainers.update.losses import PolicyLoss, behaviour_kl, kl, value_loss
from agentfactory.trainers.update.mismatch import mismatch_kl, mismatch_weights


@dataclass(frozen=True)
class PolicyUpdate:
    """The result of the updates on one batch."""

    updates: list[Update]
    before: list[dict[str, Tensor]]
    """Streams from before the first update, along the targets of each micro-batch: `proximal` (log-probabilities), and
    `divergence` from the teacher (NaN: not graded), if there is one. Empty if only the critic learned."""


def update_policy(learner: Learner, batch: Batch, recipe: TrainRecipe, critic_only: bool = False) -> PolicyUpdate:
    """Perform `updates_per_batch` optimiser updates, each on the whole batch (PPO's epochs).

    The proximal log-probabilities are those of the first update's own forward pass. The mismatch correction weights the
    policy term by proximal over behaviour."""
    train = recipe.train
    config, teacher = train.loss, recipe.teacher
    policy_loss = PolicyLoss(config)
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
            "entropy": entropy.detach()[real].sum(),
            "clipped": clipped[real].sum(),
            "corrected": corrected[real].sum(),
            "mismatch": gap.abs().sum(),
            "mismatch_kl": mismatch_kl(gap, torch.zeros_like(gap)).sum(),
            "mixed": mixed.sum(),
            "mismatch_mixed": gap.abs()[mixed].sum(),
        }
        if teacher is not None and divergence is not None:
            if not teacher.is_sampled:
                terms = terms + teacher.coefficient * divergence
            if first:
                before[index]["divergence"] = divergence.detach().where(graded, torch.nan)
            sums |= {"teacher_kl": divergence.detach()[graded].sum(), "graded": graded.sum()}
        if config.behaviour_kl:
            held = behaviour_kl(logprob, streams["behaviour"])
            terms = terms + config.behaviour_kl * held
            sums["behaviour_kl"] = held.detach()[real].sum()
        if config.kl.coefficient and config.kl.place == "loss":
            distance = kl(config.kl.estimator, logprob, streams["reference"])
            terms = terms + config.kl.coefficient * distance
            sums["kl"] = distance.detach()[real].sum()
        if config.entropy_bonus:
            terms = terms - config.entropy_bonus * entropy
        return Terms(loss=(weight * terms).sum(), sums=sums, maxima={"mismatch": gap.abs().max()})

    def critic_loss(part: MicroBatch, values: Targets) -> Terms:
        streams = part.streams
        terms, clipped = value_loss(values, streams["value"], streams["return"], train.critic.value_clip)
        real = streams["weight"] > 0
        sums = {"value_loss": terms.detach()[real].sum(), "value_clipped": clipped[real].sum()}
        return Terms(loss=(streams["weight"] * terms).sum(), sums=sums)

    terms = None if critic_only else loss, critic_loss if learner.has_critic else None
    updates = [learner.update(batch, *terms) for _ in range(train.updates_per_batch)]
    return PolicyUpdate(updates, before)


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
