"""Run by test_accelerator.py, with or without accelerate's launcher: training from saved groups, recipe after recipe.

Arguments: recipes as a JSON list, a trajectories file, a folder for a subfolder of checkpoints per recipe.
"""

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import LaunchError, make_accelerator


def train(recipe: TrainRecipe, accelerator: Accelerator, trajectories: Path, folder: Path) -> None:
    # imported late: a refused launch need not wait for it
    from transformers import AutoTokenizer

    from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
    from agentfactory.trainers.loop.rl import SavedGroups, Services, train_rl
    from agentfactory.trainers.sync.canary import Canary, canary_rows

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


def main() -> int:
    recipes = [TrainRecipe.model_validate(recipe) for recipe in json.loads(sys.argv[1])]
    try:
        accelerator = make_accelerator(recipes[0])
    except LaunchError as error:
        # one write, even if PYTHONUNBUFFERED is set: the ranks share the pipe
        sys.stdout.write(f"rank {os.environ.get('RANK', '0')} refused: {error}\n")
        return 2
    for number, recipe in enumerate(recipes):
        train(recipe, accelerator, Path(sys.argv[2]), Path(sys.argv[3]) / str(number))
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
