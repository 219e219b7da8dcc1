"""Run under `accelerate launch` by test_launch.py: one GRPO step from saved groups, or the refusal of the launch.

Arguments: a recipe as JSON, a trajectories file, a folder for checkpoints.
"""

import json
import os
import sys
from pathlib import Path

from transformers import AutoTokenizer

from trainers.config import TrainRecipe
from trainers.grpo import SavedGroups, train_grpo
from trainers.launch import LaunchError, make_accelerator
from trainers.sync.canary import Canary, canary_rows


def main() -> int:
    """Prints what rank 0 logs as JSON lines; exit status 2 where the launch is refused."""
    recipe = TrainRecipe.model_validate(json.loads(sys.argv[1]))
    try:
        accelerator = make_accelerator(recipe.train)
    except LaunchError as error:
        print(f"rank {os.environ.get('RANK', '0')} refused: {error}", flush=True)
        return 2
    needed = recipe.train.steps * recipe.train.batch_size
    train_grpo(
        recipe,
        accelerator,
        Path(sys.argv[3]),
        source=SavedGroups(Path(sys.argv[2]), needed) if accelerator.is_main_process else None,
        sync=None,
        # every rank scores the canary's rows, also where the policy is sharded
        canary=Canary([], canary_rows(range(64), longest=40), recipe.model.dtype),
        tokenizer=AutoTokenizer.from_pretrained(recipe.model.path),
        log=lambda metrics: print(json.dumps(metrics), flush=True),
    )
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
