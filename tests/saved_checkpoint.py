"""Helpers to write a learner's checkpoint synchronously, and to read the state of any checkpoint."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from transformers import PreTrainedTokenizerBase

from agentfactory.trainers.checkpoints.checkpoint import CheckpointWriter
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import TRAINING_STATE, StateReader, settings_in


def save_checkpoint(
    folder: Path, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase, info: dict[str, Any]
) -> Path:
    """Write a checkpoint and wait until it is durable; return its path."""
    writer = CheckpointWriter(folder, tokenizer)
    writer.begin(step, learner, info)
    path = writer.wait()
    writer.close()
    return path


def training_state(checkpoint: Path) -> dict[str, Any]:
    """Full tensors and settings by key, with the random states of all ranks."""
    reader = StateReader(checkpoint / TRAINING_STATE)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(
        state,
        storage_reader=reader,
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    return {**state, "settings": settings_in(state)}
