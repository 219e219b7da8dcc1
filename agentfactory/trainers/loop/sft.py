"""Supervised fine-tuning on conversations or saved rows: the training loop."""

import itertools
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notify
from agentfactory.rollout.data import conversation_of
from agentfactory.rollout.data.load import TOO_DEEP
from agentfactory.rollout.data.notices import tell_nulls
from agentfactory.rollout.data.nulls import nulls_in_calls
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.token_row import Row
from agentfactory.trainers.batches.batch import MicroBatch, TrainingRow, training_row
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import Log, TrainResult, read_saved
from agentfactory.trainers.loop.stopping import Stop
from agentfactory.trainers.update.learner import Learner, Targets, Terms
from agentfactory.trainers.update.losses import negative_log_likelihood

logger = logging.getLogger(__name__)

_READ = {"messages", "tools", "images"}


def conversation_rows(tasks: list[dict[str, Any]], renderer: Renderer) -> list[Row]:
    """Return one row per conversation: `messages`, and `tools` in the OpenAI format if the assistant has any. A
    message's `weight` is the loss weight of its tokens, by default 1 for assistant messages and 0 for others.

    Raises SettingError with the row's number if it is not such a conversation, or if the chat template or the tool-call
    format cannot render it. Notifies the user of what is not learned."""
    rows = []
    for number, task in enumerate(tasks, 1):
        messages, specs = conversation_of(task, number)
        try:
            rows.append(renderer.conversation_row(messages, specs))
        except RenderError as error:
            fix = "correct the row, or change rollout.parser or model.chat_template"
            raise SettingError("data.path", f"row {number}: {error}", fix) from error
        except RecursionError as error:
            raise SettingError("data.path", f"row {number}: {TOO_DEEP}", "correct it") from error
    unread = sorted({name for task in tasks for name, value in task.items() if value not in (None, "", [], {})} - _READ)
    if unread:
        text = f"data: sft reads the columns {', '.join(sorted(_READ))}, and not {', '.join(unread)}"
        notify(logger, "columns that sft does not read", text, times=0)
    idle = [number for number, row in enumerate(rows, 1) if not any(row.weights or [])]
    if idle:
        text = f"data: nothing is learned from {len(idle)} of {len(rows)} rows, which have no token with a loss weight"
        notify(logger, "rows without a loss weight", f"{text} (first: row {idle[0]})", times=0)
    unknown = [0 if task.get("tools") else nulls_in_calls(task["messages"]) for task in tasks]
    tell_nulls("data", "kept", "kept in calls and learned, because the row has no tools", unknown)
    return rows


def saved_rows(path: Path, min_reward: float | None = None) -> list[Row]:
    """Return the rows of all chains of a trajectories file that did not fail and have at least `min_reward`, if given
    (rejection sampling). Raises SettingError if none is left."""
    ended = [c for group in read_saved(path) for c in group.trajectories if not c.outcome.failed]
    chosen = [c for c in ended if min_reward is None or (c.reward is not None and c.reward >= min_reward)]
    if not chosen:
        best = max((c.reward for c in ended if c.reward is not None), default=None)
        problem = f"no chain of {path} has at least {min_reward}; the best has {best}"
        raise SettingError("train.min_reward", problem, "lower it")
    return [row for chain in chosen for row in chain.rows]


def train_sft(
    recipe: TrainRecipe,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    *,
    rows: list[Row] | None,
    log: Log,
    stop: Stop | None = None,
    images: Path | None = None,
) -> TrainResult:
    """Run steps up to `recipe.train.steps`, each of `batch_size` rows, in shuffled epochs. The loss is the weighted
    negative log-likelihood of the rows' tokens, as a mean over the weights of the step's tokens.

    Every process calls it; only rank 0's `rows` and `log` are used. The rest is as in `train_rl`."""
    train, train_state, stop = recipe.train, checkpoints.train_state, stop or Stop()
    main = accelerator.is_main_process
    learner = Learner(recipe, accelerator, images=images, needs=checkpoints.token_needs())
    checkpoints.restore(learner)
    consumed = train_state.step * train.batch_size
    if main:
        learner.check_lengths(rows or [])
    examples = itertools.islice(_shuffled(rows or [], recipe.seed), consumed, None) if main else iter(())
    with checkpoints.ending():
        for step in range(train_state.step + 1, train.steps + 1):
            if stop.agreed(accelerator):
                break
            checkpoints.poll()
            started = time.perf_counter()
            batch = learner.deal(list(itertools.islice(examples, train.batch_size)))
            learning_rate = learner.learning_rate
            update = learner.update(batch, _weighted_likelihood)
            learner.schedule.step()
            seconds = time.perf_counter() - started
            train_state.finish(step, [], seconds)
            if main:
                train_state.metrics = {
                    "step": step,
                    "loss": update.loss,
                    "grad_norm": update.grad_norm,
                    "learning_rate": learning_rate,
                    "tokens": batch.tokens,
                    "tokens_per_second": batch.tokens / seconds,
                    "seconds/step": seconds,
                }
                log(train_state.metrics)
            if checkpoints.due(step):
                checkpoints.save(learner)
        if train_state.step > checkpoints.saved_step:
            checkpoints.save(learner)
    return TrainResult.of(checkpoints, stop)


def _weighted_likelihood(index: int, part: MicroBatch, logprob: Targets, entropy: Targets) -> Terms:
    return Terms(loss=(part.streams["weight"] * negative_log_likelihood(logprob)).sum())


def _shuffled(rows: list[Row], seed: int) -> Iterator[TrainingRow]:
    """Yield endless epochs, each with its own shuffle that depends only on (seed, epoch)."""
    examples = [example for example in map(training_row, rows) if example is not None]
    if not examples:
        raise SettingError("data.path", f"none of its {len(rows)} rows has a token with a loss weight", "use others")
    for epoch in itertools.count():
        yield from random.Random(f"rows/{seed}/{epoch}").sample(examples, len(examples))
