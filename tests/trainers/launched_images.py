"""Run in two processes, and in one, by test_images_launched.py: scores and an update of rows with images.

Arguments: recipes as a JSON list, a folder of images, the rows as a pickle, a file for the results.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy


def scores_and_weights(
    recipe: TrainRecipe, accelerator: Accelerator, images: Path, rows: list[TrainingRow]
) -> dict[str, Any]:
    """Return rank 0's results: the rows' scores, weights after an update, and which micro-batches had images."""
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


def main() -> None:
    """Save the results of every recipe, each rank in a separate file."""
    recipes = [TrainRecipe.model_validate(recipe) for recipe in json.loads(sys.argv[1])]
    images, rows = Path(sys.argv[2]), pickle.loads(Path(sys.argv[3]).read_bytes())
    accelerator = make_accelerator(recipes[0])
    found = []
    for recipe in recipes:
        found.append(scores_and_weights(recipe, accelerator, images, rows if accelerator.is_main_process else []))
        accelerator.free_memory()
        if accelerator.is_fsdp2:
            # the next network's layers have another class
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
            accelerator.state.fsdp_plugin.auto_wrap_policy = transformer_auto_wrap_policy
    torch.save(found, f"{sys.argv[4]}-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
