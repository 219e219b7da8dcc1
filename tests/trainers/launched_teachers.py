"""An update with a teacher, on one process or two: see test_teachers.py."""

import random
from typing import Any

from accelerate import Accelerator

from agentfactory.trainers.batches.batch import TrainingRow, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import needed_scores
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_metrics, update_policy
from tests.trainers.conftest import make_row
from tests.trainers.ranks import whole

TEMPERATURE = 0.7


def make_rows(count: int = 6) -> list[TrainingRow]:
    """Return rows of several turns; each second one begins as the one before it, so that trees have branches."""
    rng = random.Random(2)
    rows = [make_row(rng) for _ in range(count)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        second.token_ids[:4] = first.token_ids[:4]
    return [training_row(row, rng.gauss(0.0, 1.0)) for row in rows]


def in_context_rows() -> list[TrainingRow]:
    """Return the rows of `make_rows` after longer and shorter prompts of a teacher; the third one has none."""
    rng = random.Random(5)
    rows = [make_row(rng) for _ in range(6)]
    for number, row in enumerate(rows):
        first = row.mask.index(1)
        if number != 2:
            further = [rng.randrange(64) for _ in range(3 + 2 * number)]
            row.teacher_prompt = row.token_ids[: first - number % 3] + further
    return [training_row(row, rng.gauss(0.0, 1.0)) for row in rows]


def exercise(recipe: TrainRecipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the metrics of an update on `make_rows`, and its gradients, which change no weight."""
    learner = Learner(recipe, accelerator, TEMPERATURE)
    learner.optimizer.step = learner.optimizer.zero_grad = lambda: None
    made = in_context_rows if recipe.teacher is not None and recipe.teacher.context is not None else make_rows
    rows = made() if accelerator.is_main_process else []
    names = needed_scores(recipe)
    batch = learner.deal(learner.score(rows, names) if names else rows)
    metrics = update_metrics(update_policy(learner, batch, recipe).updates, batch)
    named = learner.policy.named_parameters()
    gradients = {name: whole(weight.grad) for name, weight in named if weight.grad is not None}
    return {"loss": metrics["loss"], "kl": metrics["teacher/kl"], "gradients": gradients}
