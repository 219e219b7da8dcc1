"""Run by test_checkpoints.py, one process per rank: checkpoints on full disks, and from version 0.1.

Arguments: a recipe as JSON, the folder of the checkpoints, a checkpoint of version 0.1. Rank 0 has no room for the
second checkpoint, and rank 1 none for the third; the fifth has the state loaded from version 0.1. Each rank writes its
errors to rank-N.txt beside the folder."""

import json
import resource
import sys
from pathlib import Path

from transformers import AutoTokenizer

from agentfactory.base.files.disk import DiskError
from agentfactory.trainers.checkpoints.checkpoint import CheckpointWriter
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state

ROOM = 1 << 13
"""Maximum bytes of a file on a full disk."""


def main() -> int:
    recipe = TrainRecipe.model_validate(json.loads(sys.argv[1]))
    accelerator = make_accelerator(recipe)
    learner, rank = Learner(recipe, accelerator), accelerator.process_index
    writer = CheckpointWriter(Path(sys.argv[2]), AutoTokenizer.from_pretrained(recipe.model.path))
    told: list[str] = []
    for step in (1, 2, 3, 4):
        if step in (2, 3):
            room = ROOM if rank == step - 2 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            writer.begin(step, learner, {})
            writer.wait()
        except DiskError as error:
            told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    load_state(Path(sys.argv[3]), learner)
    writer.begin(5, learner, {})
    writer.wait()
    Path(sys.argv[2]).with_name(f"rank-{rank}.txt").write_text("\n".join(told))
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
