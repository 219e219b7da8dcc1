"""Run in two processes by test_teachers.py: an update with a teacher, on one process or two.

Arguments: recipes as JSON lists, a file for rank 0's results.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from agentfactory.trainers.batches.batch import TrainingRow, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import needed_scores
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_metrics, update_policy
from tests.trainers.conftest import make_row

TEMPERATURE = 0.7


def make_rows(count: int = 6) -> list[TrainingRow]:
    """Return rows of several turns; each second one begins as the one before it, so that trees have branches."""
    rng = random.Random(2)
    rows = [make_row(rng) for _ in range(count)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        second.token_ids[:4] = first.token_ids[:4]
    made = [training_row(row, rng.gauss(0.0, 1.0)) for row in rows]
    return [row for row in made if row is not None]


def in_context_rows() -> list[TrainingRow]:
    """Return the rows of `make_rows` after longer and shorter prompts of a teacher; the third one has none."""
    rng = random.Random(5)
    rows = [make_row(rng) for _ in range(6)]
    for number, row in enumerate(rows):
        first = row.mask.index(1)
        if number != 2:
            row.teacher_prompt = row.token_ids[: first - number % 3] + [
                rng.randrange(64) for _ in range(3 + 2 * number)
            ]
    made = [training_row(row, rng.gauss(0.0, 1.0)) for row in rows]
    return [row for row in made if row is not None]


def exercise(recipe: TrainRecipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the metrics of an update on `make_rows`, and its gradients, which change no weight."""
    learner = Learner(recipe, accelerator, TEMPERATURE)
    learner.optimizer.step = learner.optimizer.zero_grad = lambda: None
    made = in_context_rows if recipe.teacher is not None and recipe.teacher.context is not None else make_rows
    rows = made() if accelerator.is_main_process else []
    names = needed_scores(recipe)
    batch = learner.deal(learner.score(rows, names) if names else rows)
    metrics = update_metrics(update_policy(learner, batch, recipe).updates, batch)
    gradients = {}
    for name, weight in learner.policy.named_parameters():
        if weight.grad is not None:
            gradients[name] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad.clone()
    return {"loss": metrics["loss"], "kl": metrics["teacher/kl"], "gradients": gradients}


def main() -> None:
    """Save the result of `exercise` for each recipe."""
    recipes = [TrainRecipe.model_validate(fields) for fields in json.loads(sys.argv[1])]
    accelerator = make_accelerator(recipes[0])
    found = []
    for recipe in recipes:
        found.append(exercise(recipe, accelerator))
        accelerator.free_memory()
    if accelerator.is_main_process:
        torch.save(found, Path(sys.argv[2]))
    accelerator.end_training()


if __name__ == "__main__":
    main()
