"""Group-relative policy optimisation: the loop (Shao et al., 2024, DeepSeekMath, arXiv:2402.03300)."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollout.config import OutcomePolicy
from rollout.staleness import WeightVersions
from rollout.trajectory import Group, Trajectory, read_groups
from trainers.advantages import group_advantages
from trainers.batch import Batch, MicroBatch, TrainingRow, padded, scatter, training_row
from trainers.checkpoint import save_checkpoint
from trainers.config import TrainRecipe
from trainers.learner import Learner, Terms, Update
from trainers.losses import clipped_policy_loss, mismatch_kl
from trainers.metrics import group_metrics
from trainers.sync import WeightSync
from trainers.sync.canary import Canary, push_proven

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, Any]], None]


class GroupSource(Protocol):
    """Where scored groups come from. Only rank 0 has one; its opener closes it."""

    def next_batch(self, groups: int) -> list[Group]:
        """The next groups to train on; waits for them."""

    def published(self, version: int, model: str) -> None:
        """Weights of this version are live: new turns ask the server for `model`. The first call is version 0."""

    def figures(self) -> dict[str, float]:
        """What was counted while the last batch was made, by metric name."""

    def acknowledge(self, group_ids: list[str]) -> None:
        """A durable checkpoint holds what these groups taught."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the published weights on held-out tasks; empty if there are none."""


class SavedGroups:
    """Groups from trajectories files, in their order, each once: training without worker or server."""

    def __init__(self, path: Path, needed: int) -> None:
        """Raises ValueError where `path` holds fewer than `needed` groups, or a line that is not one."""
        if not path.exists():
            raise ValueError(f"train.from_trajectories: {path} does not exist")
        held = sum(1 for _ in read_groups(path))
        if held < needed:
            raise ValueError(
                f"train.from_trajectories: {path} holds {held} groups, and train.steps x train.batch_size asks for "
                f"{needed}; lower one of them"
            )
        self._groups = read_groups(path)

    def next_batch(self, groups: int) -> list[Group]:
        """The next groups of the file."""
        return [next(self._groups) for _ in range(groups)]

    def published(self, version: int, model: str) -> None:
        """Saved groups do not depend on the weights."""

    def figures(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def acknowledge(self, group_ids: list[str]) -> None:
        """The files stay as they are."""

    def evaluate(self) -> dict[str, float]:
        """Nothing generates, so nothing can be evaluated."""
        return {}


@dataclass
class TrainResult:
    """What a training run leaves behind (rank 0; the other ranks know steps and seconds only)."""

    steps: int
    seconds: float
    """Time in training steps, waiting for groups included; without evaluation and checkpoints."""
    checkpoint: Path | None = None
    before: dict[str, float] = field(default_factory=dict)
    """Evaluation of the first weights."""
    after: dict[str, float] = field(default_factory=dict)
    """Evaluation of the last weights."""


def train_grpo(
    recipe: TrainRecipe,
    accelerator: Accelerator,
    folder: Path,
    *,
    source: GroupSource | None,
    sync: WeightSync | None,
    tokenizer: PreTrainedTokenizerBase,
    log: Log,
    canary: Canary | None = None,
    checkpoint_info: dict[str, Any] | None = None,
) -> TrainResult:
    """Runs `recipe.train.steps` steps; each takes a batch of groups, updates the policy, and publishes new weights.

    Every process calls it. `source`, `sync` and `log` are used on rank 0 only; `source` is None elsewhere, `sync` is
    None where no server is to be updated; `canary` proves what `sync` has pushed, and is given to all. Checkpoints go
    to `folder` as step-000080 and so on, with `tokenizer` and `checkpoint_info` (JSON) beside the weights. Version 0
    are the first weights; step k ends with version k.
    """
    train = recipe.train
    main = accelerator.is_main_process
    learner = Learner(recipe, accelerator, recipe.rollout.temperature)
    result = TrainResult(steps=train.steps, seconds=0.0)
    trained: list[str] = []
    weights = WeightVersions(adapters=recipe.model.lora is not None)

    def publish(version: int) -> dict[str, float]:
        state = learner.policy.gather()
        scores = canary.trainer_scores(learner.policy) if canary else None
        if sync is None or source is None:
            return {}
        started = time.perf_counter()
        report, proof = push_proven(sync, canary, version, learner.policy, state, scores)
        weights.note(version, report.model)
        source.published(version, report.model)
        logger.info("version %d is live as %s, sha256 of its file %s", version, report.model, report.digest)
        return {"sync/bytes": report.bytes, "seconds/sync": time.perf_counter() - started, **proof}

    def evaluate(step: int) -> dict[str, float]:
        if source is None:
            return {}
        started = time.perf_counter()
        metrics = source.evaluate()
        if metrics:
            log({"step": step, **metrics, "seconds/eval": time.perf_counter() - started})
        return metrics

    first = publish(0)
    if first:
        log({"step": 0, "version": 0, **first})
    result.before = evaluate(0)
    for step in range(1, train.steps + 1):
        started = time.perf_counter()
        groups = source.next_batch(train.batch_size) if source else []
        waited = time.perf_counter()
        # the groups of saved files have the versions of another run
        ages = weights.ages(groups, step - 1) if sync else Counter[int]()
        if max(ages, default=0) > recipe.rollout.max_staleness:
            raise ValueError(
                f"step {step}: a token is {max(ages)} versions old, and rollout.max_staleness is "
                f"{recipe.rollout.max_staleness} (a bug)"
            )
        rows = credit(groups, recipe)
        if main and not rows:
            outcomes = sorted({t.outcome.value for group in groups for t in group.trajectories})
            raise ValueError(f"step {step}: no chain of the batch can be trained; they ended {', '.join(outcomes)}")
        batches = padded(rows, train.token_budget, accelerator.num_processes) if main else None
        batch = scatter(batches, accelerator)
        learning_rate = learner.learning_rate
        updates = ppo_updates(learner, batch, recipe)
        learner.end_step()
        updated = time.perf_counter()

        sync_metrics = publish(step)
        ended = time.perf_counter()
        result.seconds += ended - started
        if main:
            trained += [group.id for group in groups]
            metrics = {
                "step": step,
                "version": step,
                **group_metrics(groups, ages),
                **(source.figures() if source else {}),
                **update_metrics(updates, batch),
                "learning_rate": learning_rate,
                "tokens": batch.tokens,
                "tokens_per_second": batch.tokens / (ended - started),
                "seconds/step": ended - started,
                "seconds/wait": waited - started,
                "seconds/update": updated - waited,
                **sync_metrics,
            }
            log(metrics)

        last = step == train.steps
        if last or (train.checkpoint_every and step % train.checkpoint_every == 0):
            state = learner.policy.gather()
            if source:
                info = {"algorithm": "grpo", "seed": recipe.seed, "version": step, **(checkpoint_info or {})}
                info["groups"] = trained
                result.checkpoint = save_checkpoint(folder, step, learner.policy, state, tokenizer, info)
                source.acknowledge(trained)
                trained = []
            accelerator.wait_for_everyone()
        if last or (recipe.eval.every and step % recipe.eval.every == 0):
            result.after = evaluate(step)
    return result


def credit(groups: list[Group], recipe: TrainRecipe) -> list[TrainingRow]:
    """Training rows of all groups. A chain's advantage is that of its reward within its group, and all its rows share
    it; a chain without reward, or that broke (unless `rollout.on_failure` keeps its outcome), is neither trained nor
    in the baseline."""
    rows: list[TrainingRow] = []
    for group in groups:
        rewards = [_reward(trajectory, recipe) for trajectory in group.trajectories]
        advantages = group_advantages(rewards, recipe.train.scale_advantages)
        for trajectory, reward, advantage in zip(group.trajectories, rewards, advantages, strict=True):
            if reward is not None:
                made = [training_row(row, advantage) for row in trajectory.rows]
                rows += [row for row in made if row is not None]
    return rows


def _reward(trajectory: Trajectory, recipe: TrainRecipe) -> float | None:
    kept = recipe.rollout.on_failure.get(trajectory.outcome) == OutcomePolicy.KEEP
    return trajectory.reward if kept or not trajectory.outcome.failed else None


def ppo_updates(learner: Learner, batch: Batch, recipe: TrainRecipe) -> list[Update]:
    """`updates_per_batch` optimiser updates, each on the whole batch (PPO's epochs).

    The proximal log-probabilities are those of the first update's own forward pass, since all its micro-batches see
    the weights from before the update: they cost no pass of their own.
    """
    proximal: list[Tensor] = []

    def loss(
        index: int, part: MicroBatch, logprob: Float[Tensor, "targets"], entropy: Float[Tensor, "targets"]
    ) -> Terms:
        if index == len(proximal):
            proximal.append(logprob.detach())
        train = recipe.train
        terms, clipped = clipped_policy_loss(logprob, proximal[index], part.advantage, train.clip_low, train.clip_high)
        # real tokens weigh more than 0; those that keep a process in step do not count
        real = part.weight > 0
        gap = torch.where(real, proximal[index] - part.behaviour, 0.0)
        return Terms(
            loss=(part.weight * terms).sum(),
            sums={
                "entropy": entropy[real].sum(),
                "clipped": clipped[real].sum(),
                "mismatch": gap.abs().sum(),
                "mismatch_kl": mismatch_kl(gap, torch.zeros_like(gap)).sum(),
                "mixed": (real & part.mixed).sum(),
                "mismatch_mixed": gap.abs()[part.mixed].sum(),
            },
            maxima={"mismatch": gap.abs().max()},
        )

    return [learner.update(batch, loss) for _ in range(recipe.train.updates_per_batch)]


def update_metrics(updates: list[Update], batch: Batch) -> dict[str, float]:
    """Means over a step's updates; entropy and mismatch are those before the first."""
    count, first = len(updates), updates[0]
    mixed = first.sums["mixed"]
    return {
        "loss": sum(update.loss for update in updates) / count,
        "grad_norm": sum(update.grad_norm for update in updates) / count,
        "clip_fraction": sum(update.sums["clipped"] for update in updates) / count / batch.tokens,
        "entropy": first.sums["entropy"] / batch.tokens,
        "mismatch/mean": first.sums["mismatch"] / batch.tokens,
        "mismatch/max": first.maxima["mismatch"],
        "mismatch/kl": first.sums["mismatch_kl"] / batch.tokens,
        **(
            {"mismatch/mixed": first.sums["mismatch_mixed"] / mixed, "mixed_tokens": mixed / batch.tokens}
            if mixed
            else {}
        ),
    }
