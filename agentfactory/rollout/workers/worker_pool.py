"""The pool of a run's rollout workers, which supplies the training loop with groups."""

import logging
import select
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from agentfactory.base.run_notices import notify
from agentfactory.rollout.data import Share
from agentfactory.rollout.inference.stalls import STALL_SECONDS
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.workers.worker_socket import Job, WorkerProcess

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class RolloutWorkers:
    """A pool of `rollout.workers` processes, each of which produces an equal share of every batch. Its methods block,
    and raise WorkerDiedError. For `restore` see WorkerProcess. The workers log to `logs`."""

    def __init__(self, job: Job, logs: Path, restore: Callable[[str], bool]) -> None:
        count = job.recipe.rollout.workers
        self._evaluates = job.recipe.eval.data is not None
        self._figures: dict[str, float] = {}
        self._workers: list[WorkerProcess] = []
        with ExitStack() as failure:
            failure.callback(self.close)
            for number in range(count):
                log = logs / (f"worker-{number}.log" if number else "worker.log")
                self._workers.append(WorkerProcess(job, Share(number, count), log, restore))
            self.ready, *_ = [worker.wait_until_ready() for worker in self._workers]
            failure.pop_all()

    def next_batch(self, groups: int) -> list[Group]:
        """Wait for the next batch: `groups` groups, or fewer if the recipe drops groups with equal rewards."""
        self._hear_until(lambda: all(worker.batches for worker in self._workers))
        batch: list[Group] = []
        figures: Counter[str] = Counter()
        for worker in self._workers:
            own, counted = worker.take_batch(groups // len(self._workers))
            batch += own
            figures.update(counted)
        self._figures = dict(figures)
        return batch

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last batch's production, summed over workers, by name."""
        return self._figures

    def published(self, published: Published) -> None:
        """Notify the workers of the live weights; the first call starts generation."""
        for worker in self._workers:
            worker.started = True
            worker.send("published", **asdict(published))

    def acknowledge(self, group_ids: list[str]) -> None:
        """Record that a durable checkpoint includes the training on these groups."""
        self._workers[0].send("acknowledge", groups=group_ids)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the published weights. Return the metrics as `eval/...`; empty if there are no held-out tasks."""
        if not self._evaluates:
            return {}
        first = self._workers[0]
        first.send("evaluate")
        self._hear_until(lambda: bool(first.evaluations))
        return {f"eval/{name}": value for name, value in first.evaluations.popleft().items()}

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _hear_until(self, done: Callable[[], bool]) -> None:
        """Process messages until `done`. Notify of workers silent for STALL_SECONDS; end those held up too long."""
        since = time.monotonic()
        by_socket = {worker.messages.source.fileno(): worker for worker in self._workers}
        sockets = select.poll()
        for number in by_socket:
            sockets.register(number, select.POLLIN)
        silent = {worker: since for worker in self._workers if worker.started}
        """Worker -> time of its last message."""
        told: set[WorkerProcess] = set()
        while not done():
            spoken = [worker for worker in self._workers if worker.messages.has_message or worker.messages.ended]
            if spoken:
                for worker in spoken:
                    worker.hear()
                continue
            for number, _ in sockets.poll(1000 * min(STALL_SECONDS, _LOOK_SECONDS) if silent else None):
                worker = by_socket[number]
                worker.messages.receive()
                if worker.started:
                    silent[worker] = time.monotonic()
            for worker, quiet_since in silent.items():
                seconds = time.monotonic() - quiet_since
                if seconds < STALL_SECONDS:
                    continue
                if worker not in told:
                    told.add(worker)
                    text = f"the rollout worker has sent no message for {STALL_SECONDS:g} s: "
                    held = worker.held_by()
                    text += "; fix: ".join(held) if held else "its process is stopped, or code blocks its event loop"
                    notify(logger, f"{worker.log_file.name} stands still", text, see=str(worker.log_file))
                worker.end_if_held(seconds)
