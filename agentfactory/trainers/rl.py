"""Reinforcement learning from groups of chains: the loop, whatever the algorithm."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.weight_versions import WeightVersions
from agentfactory.trainers.checkpoints import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.credit import Credit, Credited, needed_scores
from agentfactory.trainers.health import Symptom
from agentfactory.trainers.learner import Learner
from agentfactory.trainers.metrics import group_metrics
from agentfactory.trainers.mismatch import mismatch_by_kind
from agentfactory.trainers.policy_update import update_metrics, update_policy
from agentfactory.trainers.source import GroupSource
from agentfactory.trainers.stopping import Stop
from agentfactory.trainers.sync import WeightSync
from agentfactory.trainers.sync.canary import Canary, push_proven
from agentfactory.trainers.sync.drift import Scores
from agentfactory.trainers.time_share import Turns

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, Any]], None]

Note = Callable[[int, list[Group], list[str]], None]
"""(step, its groups, what their tokens were credited with: the JSON of each group, or nothing) -> None."""


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves behind; checkpoint and figures are known on rank 0 only."""

    steps: int
    seconds: float
    """Time in training steps, waiting for groups included; without evaluation and checkpoints."""
    checkpoint: Path | None
    before: dict[str, float]
    """Evaluation of the first weights."""
    after: dict[str, float]
    """Evaluation of the last weights."""
    stopped: Signals | Symptom | None
    """What ended it before its last step."""

    @classmethod
    def of(cls, checkpoints: Checkpoints, stop: Stop) -> "TrainResult":
        """The result of a loop that has ended."""
        line = checkpoints.train_state
        return cls(line.step, line.seconds, checkpoints.path, line.before, line.after, stop.agreed_on)


def train_rl(
    recipe: TrainRecipe,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    *,
    source: GroupSource | None,
    sync: WeightSync | None,
    log: Log,
    note: Note | None = None,
    canary: Canary | None = None,
    stop: Stop | None = None,
    turns: Turns | None = None,
) -> TrainResult:
    """Runs steps up to `recipe.train.steps`; each takes a batch of groups, updates the policy, and publishes its new
    weights.

    Every process calls it. `source`, `sync`, `log` and `note` are used on rank 0 only; `source` is None elsewhere,
    `sync` is None where no server is to be updated; `canary` proves what `sync` has pushed, and is given to all.
    `checkpoints` says where the run goes on from; `stop` ends it after the present step; `turns` has the trainer's
    device for a server meanwhile. Version 0 are the first weights; step k ends with version k.
    """
    train, every = recipe.train, recipe.eval.every
    main = accelerator.is_main_process
    stop, turns = stop or Stop(), turns or Turns()
    train_state = checkpoints.train_state
    scores = needed_scores(recipe)
    weights = WeightVersions(adapters=recipe.model.lora is not None, numbers=train_state.labels)

    def canary_scores() -> Scores | None:
        return canary.trainer_scores(learner.policy, learner.policy_forward) if canary else None

    def publish(version: int, expected: Scores | None) -> dict[str, float]:
        state = learner.policy.gather()
        if sync is None or source is None:
            return {}
        started = time.perf_counter()
        pushed = stop.wait_for(lambda: push_proven(sync, canary, version, learner.policy, state, expected))
        if pushed is None:
            return {}
        report, proof = pushed
        weights.note(version, report.model)
        source.published(version, report.model)
        logger.info("version %d is live as %s, digest of its content %s", version, report.model, report.digest)
        return {"sync/bytes": report.bytes, "seconds/sync": time.perf_counter() - started, **proof}

    def evaluate(step: int) -> bool:
        """Whether the step is one to evaluate."""
        due = step in (0, train.steps) or (every > 0 and step % every == 0)
        if source is None or not due or train_state.evaluated == step:
            return due
        started = time.perf_counter()
        metrics = stop.wait_for(source.evaluate)
        if metrics is not None:
            train_state.note_evaluation(step, metrics)
        if metrics:
            log({"step": step, **metrics, "seconds/eval": time.perf_counter() - started})
        return True

    def save(only_best: bool = False) -> None:
        checkpoints.save(learner, only_best)
        if source:
            source.acknowledge(train_state.take_groups())

    with turns.training():
        learner = Learner(recipe, accelerator, recipe.rollout.temperature)
        turns.share(learner)
        checkpoints.restore(learner)
        expected = canary_scores()
    first = {**publish(train_state.step, expected), **turns.take_seconds()}
    if first and train_state.step == 0:
        log({"step": 0, "version": 0, **first})
    evaluate(train_state.step)
    for step in range(train_state.step + 1, train.steps + 1):
        started = time.perf_counter()
        groups = (stop.wait_for(lambda: source.next_batch(train.batch_size)) or []) if source else []
        if stop.agreed(accelerator):
            break
        waited = time.perf_counter()
        # the groups of saved files have the versions of another run
        ages = weights.ages(groups, step - 1) if sync else Counter[int]()
        if max(ages, default=0) > recipe.rollout.max_staleness:
            raise ValueError(
                f"step {step}: a token is {max(ages)} versions old, and rollout.max_staleness is "
                f"{recipe.rollout.max_staleness} (a bug)"
            )
        credit = Credit(groups, recipe)
        age = partial(weights.age, version=step - 1)
        if main and not credit.rows:
            outcomes = sorted({t.outcome.value for group in groups for t in group.trajectories})
            raise ValueError(f"step {step}: no chain of the batch can be trained; they ended {', '.join(outcomes)}")
        with turns.training():
            entered = time.perf_counter()
            rows = learner.score(credit.rows, scores) if scores else credit.rows
            credited = credit.assign(rows) if main else Credited()
            batch = learner.deal(credited.rows, credited.normaliser)
            learning_rate = learner.learning_rate
            proximal: list[Tensor] = []
            updates = update_policy(learner, batch, recipe, step <= train.critic.warmup_steps, proximal)
            learner.end_step()
            updated = time.perf_counter()
            expected = canary_scores()
            by_row: dict[int, dict[str, list[float]]] = {}
            if proximal:
                by_row = learner.by_row(batch, [{"proximal": values} for values in proximal])
        sync_metrics = publish(step, expected)
        scored = [by_row[number]["proximal"] for number in range(len(by_row))]
        if main and note is not None:
            # meanwhile chains run on the new weights
            note(step, groups, credit.lines(step, credited.rows, scored) if recipe.track.credit else [])
        ended = time.perf_counter()
        train_state.finish(step, [group.id for group in groups], ended - started)
        if main:
            mismatches = (
                mismatch_by_kind(credited.rows, credit.sources, scored, age if sync else None) if scored else {}
            )
            train_state.metrics = {
                "step": step,
                "version": step,
                **group_metrics(groups, ages),
                **(source.figures() if source else {}),
                **credited.metrics,
                **update_metrics(updates, batch),
                **mismatches,
                "learning_rate": learning_rate,
                "tokens": batch.tokens,
                "tokens_per_second": batch.tokens / (ended - started),
                "seconds/step": ended - started,
                "seconds/wait": waited - started,
                "seconds/update": updated - entered,
                **turns.take_seconds(),
                **sync_metrics,
            }
            log(train_state.metrics)
        is_best = evaluate(step) and checkpoints.is_best(accelerator)
        if is_best or checkpoints.due(step):
            save(only_best=not checkpoints.due(step))
    if train_state.step > checkpoints.saved_step:
        # a signal came between two checkpoints
        save()
    return TrainResult.of(checkpoints, stop)
