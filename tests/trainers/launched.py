"""Run by test_accelerator.py, with or without accelerate's launcher: training from saved groups, recipe after recipe.

Arguments: recipes as a JSON list, a trajectories file, a folder for a subfolder of checkpoints per recipe."""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from transformers import AutoTokenizer

from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import SavedGroups, Services, train_rl
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.sync.canary import Canary, canary_rows


def train(recipe: TrainRecipe, accelerator: Accelerator, trajectories: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    train_rl(
        recipe,
        accelerator,
        Checkpoints(folder, tokenizer, recipe.train),
        Services(
            lambda metrics: print(json.dumps(metrics), flush=True),
            source=SavedGroups(trajectories, recipe.train.steps * recipe.train.batch_size)
            if accelerator.is_main_process
            else None,
            # every rank scores the canary's rows, also if the policy is sharded
            canary=Canary([], canary_rows(range(64), longest=40), recipe.model.dtype),
        ),
    )
    # the next recipe has another model
    accelerator.free_memory()


def main() -> None:
    recipes = [TrainRecipe.model_validate(recipe) for recipe in json.loads(sys.argv[1])]
    accelerator = make_accelerator(recipes[0])
    for number, recipe in enumerate(recipes):
        train(recipe, accelerator, Path(sys.argv[2]), Path(sys.argv[3]) / str(number))
    accelerator.end_training()


if __name__ == "__main__":
    main()
