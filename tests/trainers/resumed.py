"""A course on saved groups, run at once and resumed in between."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.rl import SavedGroups, Services, train_rl
from agentfactory.trainers.loop.sft import train_sft
from tests.saved_groups import write_groups

_TIMING = ("seconds/", "tokens_per_second")


def train_twice(
    recipe: TrainRecipe, groups: Sequence[Group], tokenizer: PreTrainedTokenizerFast, folder: Path, resume_at: int
) -> tuple[list[dict[str, float]], Path, Path]:
    """Train on all of `groups` (SFT: on their rows), then again from the checkpoint of step `resume_at`. Assert that
    the metrics of both are equal, and return them with the last checkpoint of each."""
    file, train = folder / "groups.jsonl", recipe.train
    write_groups(file, groups)

    def run(name: str, resume: Path | None) -> list[dict[str, float]]:
        logged: list[dict[str, float]] = []
        info = {"recipe": {"model": recipe.model.model_dump()}}
        checkpoints = Checkpoints(folder / name, tokenizer, train, info, resume=resume)
        # regardless of earlier random draws of this process
        torch.manual_seed(len(name))
        if train.algorithm == "sft":
            rows = [row for group in groups for chain in group.trajectories for row in chain.rows]
            train_sft(recipe, Accelerator(cpu=True), checkpoints, rows=rows, log=logged.append)
        else:
            seen = checkpoints.train_state.step * train.batch_size
            source = SavedGroups(file, needed=train.steps * train.batch_size, skip=seen)
            train_rl(recipe, Accelerator(cpu=True), checkpoints, Services(logged.append, source=source))
        return [{name: value for name, value in line.items() if not name.startswith(_TIMING)} for line in logged]

    whole = run("whole", None)
    assert len(whole) == train.steps
    assert run("resumed", folder / "whole" / f"step-{resume_at:06}") == whole[resume_at:]
    last, again = (folder / name / f"step-{train.steps:06}" for name in ("whole", "resumed"))
    return whole, last, again
