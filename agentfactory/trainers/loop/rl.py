"""Reinforcement learning from groups of chains: the training loop, for every algorithm.

Every process runs the same steps. Each step has these parts:

    collect   GroupSource gives rank 0 a batch of groups, from the rollout worker or from files
    credit    Credit computes an advantage and a weight per sampled token; Learner first scores the rows,
              if the algorithm needs a reference, a critic or entropies
    update    Learner deals the rows to all processes (a Batch of micro-batches) and update_policy learns from them
    publish   WeightSync loads rank 0's gathered weights into the servers, the Canary proves it, the worker is notified
    record    metrics, the credit of each token, and the TrainState; then an evaluation and a checkpoint if due

`Turns` encloses all computation with the policy, for a shared device. `Stop` ends the run between two steps."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from signal import Signals
from statistics import fmean
from typing import Any, Protocol

import numpy as np
from accelerate import Accelerator

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.memory import give_back_freed
from agentfactory.base.run_notices import doing
from agentfactory.rollout.config import LateChains
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.inference.weight_versions import Published, WeightVersions
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.batches.batch import Batch
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import Symptom, TrainRecipe
from agentfactory.trainers.loop.stopping import Stop
from agentfactory.trainers.loop.time_share import Turns
from agentfactory.trainers.loop.token_advantages import Credit, Credited, needed_scores
from agentfactory.trainers.metrics import bounds_of_success, group_metrics
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.sync.proven_push import push_proven
from agentfactory.trainers.sync.weight_sync import WeightSync
from agentfactory.trainers.update.learner import Learner, Update
from agentfactory.trainers.update.policy_update import mismatch_by_kind, update_metrics, update_policy


class GroupSource(Protocol):
    """The interface of a source for the training loop. Only rank 0 has a source; the code that opens it closes it."""

    def next_batch(self, groups: int) -> list[Group]:
        """Wait for the next groups to train on, and return them."""

    def published(self, published: Published) -> None:
        """Note that these weights are live. The first call has the version with which the run begins."""

    def figures(self) -> dict[str, float]:
        """Return counts from the production of the last batch, by metric name."""

    def acknowledge(self, group_ids: list[str]) -> None:
        """Note that a durable checkpoint includes the training on these groups."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the published weights on held-out tasks; empty if there are none."""


class SavedGroups:
    """Groups from trajectories files, in order, each once: for training without a worker or server."""

    def __init__(self, path: Path, needed: int, skip: int = 0) -> None:
        """`needed` groups are read in all, the first `skip` were trained. Raises SettingError if `path` has fewer."""
        if (held := sum(1 for _ in read_saved(path))) < needed:
            problem = f"{path} holds {held} groups, and train.steps x train.batch_size asks for {needed}"
            raise SettingError("train.from_trajectories", problem, "lower one of them")
        self._groups = islice(read_groups(path), skip, None)

    def next_batch(self, groups: int) -> list[Group]:
        return [next(self._groups) for _ in range(groups)]

    def published(self, published: Published) -> None:
        """Do nothing: saved groups do not depend on the weights."""

    def acknowledge(self, group_ids: list[str]) -> None:
        """Do nothing: the files do not change."""

    def figures(self) -> dict[str, float]:
        return {}

    evaluate = figures


def read_saved(path: Path) -> Iterator[Group]:
    """Return the groups of train.from_trajectories. Raises SettingError if there is no such file or folder."""
    if not path.exists():
        raise SettingError("train.from_trajectories", f"{path} does not exist", "name a file or folder of saved groups")
    return read_groups(path)


logger = logging.getLogger(__name__)

Log = Callable[[dict[str, Any]], None]

Note = Callable[[int, list[Group], list[str]], None]
"""(step, its groups, the credit of their tokens as JSON per group, or nothing) -> None."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run; checkpoint and metrics are known on rank 0 only."""

    steps: int
    seconds: float
    """Time in training steps, including waiting for groups, without evaluation and checkpoints."""
    checkpoint: Path | None
    before: dict[str, float]
    after: dict[str, float]
    evaluated: int | None
    stopped: Signals | Symptom | None

    @classmethod
    def of(cls, checkpoints: Checkpoints, stop: Stop) -> "TrainResult":
        line = checkpoints.train_state
        return cls(line.step, line.seconds, checkpoints.path, line.before, line.after, line.evaluated, stop.agreed_on)


@dataclass(frozen=True)
class Services:
    """The loop's services. Every process has `canary`, `turns` and `stop`; the others are used on rank 0 only."""

    log: Log
    note: Note | None = None
    source: GroupSource | None = None
    sync: WeightSync | None = None
    """None if there is no server to update."""
    canary: Canary | None = None
    turns: Turns = field(default_factory=Turns)
    """Gives the trainer's device to a server between turns."""
    stop: Stop = field(default_factory=Stop)
    await_ready: Callable[[], None] = lambda: None
    """Wait for worker and servers, which start while the trainer loads its network."""


def train_rl(
    recipe: TrainRecipe,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    services: Services,
    images: Path | None = None,
) -> TrainResult:
    """Run steps up to `recipe.train.steps`; each takes a batch of groups, updates the policy, and publishes its new
    weights. Version 0 is the initial weights; step k ends with version k. Every process calls it. `checkpoints`
    contains the state to continue from. `images` is the folder of the chains' images."""
    needs = partial(checkpoints.token_needs, services.await_ready)
    with services.turns.training():
        learner = Learner(recipe, accelerator, recipe.rollout.temperature, images, needs)
        if services.canary is not None:
            services.canary.watch(learner.policy.trained_tokens)
        services.turns.share(learner)
        checkpoints.restore(learner)
        loop = _Loop(recipe, accelerator, checkpoints, learner, services)
        expected = loop.canary_scores()
    with checkpoints.ending():
        loop.begin(expected)
        for step in range(checkpoints.train_state.step + 1, recipe.train.steps + 1):
            if not loop.step(step):
                break
        loop.save_remaining()
    return TrainResult.of(checkpoints, services.stop)


@dataclass(frozen=True)
class _Learned:
    credited: Credited
    batch: Batch
    updates: list[Update]
    before: list[dict[str, np.ndarray]]
    """Per row, its streams of PolicyUpdate.before (rank 0)."""
    expected: Scores | None
    learning_rate: float
    seconds: float


@dataclass
class _Loop:
    """The parts of a step, in the order in which `step` calls them."""

    recipe: TrainRecipe
    accelerator: Accelerator
    checkpoints: Checkpoints
    learner: Learner
    services: Services

    def __post_init__(self) -> None:
        services = self.services
        self.state = self.checkpoints.train_state
        self.source, self.sync, self.canary = services.source, services.sync, services.canary
        self.turns, self.stop = services.turns, services.stop
        self.scores = needed_scores(self.recipe)
        self.versions = WeightVersions(self.state.labels)

    def begin(self, expected: Scores | None) -> None:
        """Publish and evaluate the weights that the run continues from."""
        synced = {**self.publish(self.state.step, expected), **self.turns.take_seconds()}
        if synced and self.state.step == 0:
            self.services.log({"step": 0, "version": 0, **synced})
        self.evaluate(self.state.step)

    def step(self, step: int) -> bool:
        """Run one step. Return False if the run must stop before it."""
        started = time.perf_counter()
        groups = self.collect()
        if self.stop.agreed(self.accelerator):
            return False
        self.checkpoints.poll()
        self.acknowledge()
        waited = time.perf_counter() - started
        # groups in saved files have the versions of another run
        ages = self.versions.ages(groups, step - 1) if self.sync else Counter[int]()
        most = self.recipe.rollout.max_staleness
        if max(ages, default=0) > most and self.recipe.rollout.late_chains is not LateChains.BASELINE:
            raise ValueError(f"step {step}: a token is {max(ages)} versions old, beyond rollout.max_staleness (a bug)")
        credit = self.credit(step, groups)
        if self.turns.server_sleeps and self.canary is not None:
            # a push proves this first, but by then the server has slept and may have lost its adapter
            self.canary.prove_unchanged()
        with self.turns.training():
            learned = self.update(step, credit)
        synced = self.publish(step, learned.expected)
        if self.services.note is not None and self.accelerator.is_main_process:
            # chains already run on the new weights
            self.services.note(step, groups, credit.lines(step, learned.credited.rows, learned.before))
        seconds = time.perf_counter() - started
        self.state.finish(step, [group.id for group in groups], seconds)
        if self.accelerator.is_main_process:
            seen = {"seconds/step": seconds, "seconds/wait": waited, **synced}
            self.record(step, groups, ages, credit, learned, seen)
        is_best = self.evaluate(step) and self.checkpoints.is_best(self.accelerator)
        due = self.checkpoints.due(step)
        if is_best or due:
            self.save(only_best=not due)
        return True

    # ---- the parts

    def collect(self) -> list[Group]:
        """Return the step's groups; none on ranks other than 0, or if the run must stop."""
        source, wanted = self.source, self.recipe.train.batch_size
        if source is None or self.stop.asked:
            return []
        return self.stop.wait_for(lambda: source.next_batch(wanted)) or []

    def credit(self, step: int, groups: list[Group]) -> Credit:
        """Return the credit of the groups' chains. Raises ValueError if none of them can be trained."""
        rollout, fresh = self.recipe.rollout, None
        if self.sync and rollout.late_chains is LateChains.BASELINE:
            fresh = partial(self.versions.fresh, version=step - 1, most=rollout.max_staleness)
        credit = Credit(groups, self.recipe, fresh)
        if self.accelerator.is_main_process and not credit.rows:
            outcomes = sorted({t.outcome.value for group in groups for t in group.trajectories})
            raise ValueError(f"step {step}: no chain of the batch can be trained; they ended {', '.join(outcomes)}")
        return credit

    def update(self, step: int, credit: Credit) -> _Learned:
        """Score, credit and learn; every process calls it."""
        learner, train = self.learner, self.recipe.train
        started = time.perf_counter()
        rows = learner.score(credit.rows, self.scores) if self.scores else credit.rows
        credited = credit.assign(rows) if self.accelerator.is_main_process else Credited()
        batch = learner.deal(credited.rows, credited.normaliser)
        learning_rate = learner.learning_rate
        done = update_policy(
            learner, batch, self.recipe, critic_only=train.has_critic and step <= train.critic.critic_warmup_steps
        )
        learner.schedule.step()
        # for a server on the same machine
        give_back_freed()
        seconds = time.perf_counter() - started
        expected = self.canary_scores()
        by_row = learner.by_row(batch, done.before) if done.before else {}
        before = [by_row[number] for number in range(len(by_row))]
        return _Learned(credited, batch, done.updates, before, expected, learning_rate, seconds)

    def canary_scores(self) -> Scores | None:
        learner = self.learner
        if self.canary is None:
            return None
        with doing("scoring the probes of the next sync"):
            return self.canary.trainer_scores(learner.policy, learner.policy_forward, learner.images)

    def publish(self, version: int, expected: Scores | None) -> dict[str, float]:
        """Push the weights to the servers; return metrics, empty if there was no sync. Every process calls it."""
        state = self.learner.policy.gather()
        sync, source = self.sync, self.source
        if sync is None or source is None:
            state.finish()
            return {}
        started = time.perf_counter()
        push = partial(push_proven, sync, self.canary, version, self.learner.policy, state, expected)
        with doing("the servers load the new weights and prove them"):
            pushed = self.stop.wait_for(push)
        # the other processes wait until all weights are gathered, even if a backend has not read them all
        state.finish()
        if pushed is None:
            return {}
        report, proof = pushed
        self.versions.note(report.published)
        source.published(report.published)
        # the label tells tokens of this attempt from those of another run
        logger.info(
            "version %d (%s) is live as %s, content digest %s", version, report.label, report.model, report.digest
        )
        return {"sync/bytes": report.bytes, "seconds/sync": time.perf_counter() - started, **proof}

    def record(
        self,
        step: int,
        groups: list[Group],
        ages: Counter[int],
        credit: Credit,
        learned: _Learned,
        measured: dict[str, float],
    ) -> None:
        """Log the step's metrics, with those that were `measured` (rank 0)."""
        rows, proximal = learned.credited.rows, [streams["proximal"] for streams in learned.before]
        rollout, further = self.recipe.rollout, dict[str, float]()
        trained = Counter({age: count for age, count in ages.items() if age <= rollout.max_staleness})
        if ages and rollout.late_chains is LateChains.BASELINE:
            further["staleness/untrained"] = 1 - trained.total() / ages.total()
        if self.recipe.teacher is not None and self.recipe.teacher.context is not None:
            further["teacher/graded"] = fmean(row.in_context is not None for row in rows)
        if proximal:
            age = partial(self.versions.age, version=step - 1) if self.sync else None
            further |= mismatch_by_kind(rows, credit.sources, proximal, age)
        self.state.metrics = {
            "step": step,
            "version": step,
            **group_metrics(groups, trained, [part.name for part in self.recipe.parts() if part.name]),
            **(self.source.figures() if self.source else {}),
            **learned.credited.metrics,
            **update_metrics(learned.updates, learned.batch),
            **further,
            "learning_rate": learned.learning_rate,
            "tokens": learned.batch.tokens,
            "tokens_per_second": learned.batch.tokens / measured["seconds/step"],
            "seconds/update": learned.seconds,
            **self.learner.take_seconds(),
            **self.turns.take_seconds(),
            **measured,
        }
        self.state.metrics |= bounds_of_success(self.state.metrics)
        self.services.log(self.state.metrics)

    def evaluate(self, step: int) -> bool:
        """Evaluate if an evaluation is due and not yet done; return whether one is due at this step."""
        every, source = self.recipe.eval.every, self.source
        due = step in (0, self.recipe.train.steps) or (every > 0 and step % every == 0)
        if source is None or not due or self.state.evaluated == step:
            return due
        started = time.perf_counter()
        metrics = self.stop.wait_for(source.evaluate)
        if metrics is not None:
            self.state.note_evaluation(step, metrics)
        if metrics:
            self.services.log({"step": step, **metrics, "seconds/eval": time.perf_counter() - started})
        return True

    def save(self, only_best: bool = False) -> None:
        self.checkpoints.save(self.learner, only_best)
        self.acknowledge()

    def acknowledge(self) -> None:
        """Report to the worker the groups that a durable checkpoint includes: it may forget them."""
        groups = self.checkpoints.take_groups()
        if self.source and groups:
            self.source.acknowledge(groups)

    def save_remaining(self) -> None:
        """Save the steps since the last checkpoint, as after a signal, and wait until they are durable."""
        if self.state.step > self.checkpoints.saved_step:
            self.save()
        self.checkpoints.wait()
        self.acknowledge()
