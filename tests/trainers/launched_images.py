"""Scores and an update of rows with images, on one process or two: see test_images_launched.py."""

import pickle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy


def scores_and_weights(recipe: TrainRecipe, accelerator: Accelerator, images: Path, pickled: Path) -> dict[str, Any]:
    """Return rank 0's scores of `pickled` rows, weights after an update, and which micro-batches had images."""
    rows: list[TrainingRow] = pickle.loads(pickled.read_bytes()) if accelerator.is_main_process else []
    torch.manual_seed(7)
    learner = Learner(recipe, accelerator, images=images)
    names = {"proximal", "reference", *(["value"] if learner.has_critic else [])}
    scored = learner.score(rows, names)
    if accelerator.is_main_process:
        for row in scored:
            row.streams["return"] = row.streams["advantage"]
            row.streams.setdefault("value", row.streams["advantage"])
    batch = learner.deal(scored)
    update = update_policy(learner, batch, recipe).updates[0]
    # a second update, in which no row has an image
    blind = learner.deal([row for row in scored if not row.images])
    update_policy(learner, blind, recipe)
    return {
        "scores": [{name: row.streams[name] for name in sorted(names)} for row in scored],
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "weights": dict(learner.policy.gather()),
        "seen": [len(part.images) for part in batch.micro_batches],
    }
