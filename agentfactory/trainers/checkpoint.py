"""Checkpoints: folders that transformers, peft, the server and the next stage load unchanged, and from which training
resumes exactly."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedTokenizerBase

from agentfactory.trainers.checkpoint_folder import INFO, checkpoint_path, read_info, written_aside
from agentfactory.trainers.learner import Learner

TRAINING_STATE = "training_state.pt"
"""State that training needs but a model does not: trainable weights in float32, optimiser, schedule, random numbers."""


def save_checkpoint(
    folder: Path, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase, info: dict[str, Any]
) -> Path:
    """Writes `folder`/step-000080 (for step 80) under a temporary name, makes it durable, then renames it; returns its
    path.

    It contains the model in the transformers format in the policy's dtype, or the adapter in peft's (its
    adapter_config.json names the base), the tokenizer with the chat template that `tokenizer` carries,
    `trainer_state.json` with the step and `info` (JSON, from rank 0), the training state, and the digests of all files.
    Every process calls it, rank 0 writes, and all return when it is durable. Raises FileExistsError if the checkpoint
    already exists.
    """
    path = checkpoint_path(folder, step)
    state = _training_state(learner)
    weights = learner.policy.gather()
    if learner.accelerator.is_main_process:
        with written_aside(path) as aside:
            _write_model(aside, learner, weights)
            tokenizer.save_pretrained(aside)
            torch.save(state, aside / TRAINING_STATE)
            text = json.dumps({"step": step, **info}, indent=2, ensure_ascii=False)
            (aside / INFO).write_text(text + "\n", encoding="utf-8")
    learner.accelerator.wait_for_everyone()
    return path


def load_checkpoint(path: Path, learner: Learner) -> dict[str, Any]:
    """Restores the trainable weights, including the critic's, optimiser, schedule and random numbers; returns the
    contents of `trainer_state.json`. Every process calls it.

    With the same number of processes as when it was written, training continues bit for bit as it would have; with
    another number, processes without a predecessor keep their own random numbers. Raises ValueError if the checkpoint
    contains other weights than are trained.
    """
    # mapped: otherwise weights for a GPU would take up memory once per process
    mapped = learner.accelerator.device.type != "cpu"
    state = torch.load(path / TRAINING_STATE, map_location="cpu", weights_only=True, mmap=mapped)
    held, trained = state["weights"], _trained(learner)
    if held.keys() != trained.keys():
        example = sorted(held.keys() ^ trained.keys())[0]
        raise ValueError(f"{path} holds other weights than are trained, such as {example}")
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(_like(weight, held[name].to(weight.device)))
    _load_optimizer(learner, state["optimizer"])
    # recompute the last step: train.steps may have changed, and the learning-rate schedule with it
    last = state["schedule"]
    before = {"last_epoch": last["last_epoch"] - 1, "_step_count": last["_step_count"] - 1}
    learner.schedule.load_state_dict({**last, **before})
    learner.schedule.step()
    rank = learner.accelerator.process_index
    if rank < len(state["random"]):
        _set_random_state(state["random"][rank], learner.accelerator.device)
    return read_info(path)


def _load_optimizer(learner: Learner, state: dict[str, Any]) -> None:
    if not state["state"]:
        # plain gradient descent has no state, and torch refuses to load an empty one
        return
    optimizer = _bare(learner.optimizer)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_optimizer_state_dict(learner.model, optimizer, state, options=options)
    # torch creates a state for weights that had none, such as the policy's while only its critic learns
    for name, weight in _trained(learner).items():
        if name not in state["state"]:
            optimizer.state.pop(weight, None)


def _training_state(learner: Learner) -> dict[str, Any]:
    """Returns whole tensors on the CPU, which are used only on rank 0. Every process calls it."""
    processes, main = learner.accelerator.num_processes, learner.accelerator.is_main_process
    random_states = [_random_state(learner.accelerator.device)]
    if processes > 1:
        own, random_states = random_states[0], [{}] * processes
        dist.gather_object(own, random_states if main else None)
    trained = _trained(learner)
    weights = {}
    for name, weight in trained.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if main:
            weights[name] = whole.detach().cpu()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "weights": weights,
        "optimizer": get_optimizer_state_dict(learner.model, _bare(learner.optimizer), options=options),
        "schedule": learner.schedule.state_dict(),
        "random": random_states,
    }


def _trained(learner: Learner) -> dict[str, nn.Parameter]:
    """Returns the trained weights by name; tied weights have one name."""
    if isinstance(learner.model, FSDPModule):
        # after a forward pass without a backward pass the outermost weights are still whole
        learner.model.reshard()
    named = learner.accelerator.unwrap_model(learner.model).named_parameters()
    return {name: weight for name, weight in named if weight.requires_grad}


def _like(weight: Tensor, value: Tensor) -> Tensor:
    """Returns `value`, sharded like `weight`."""
    if not isinstance(weight, DTensor):
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimiser without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns torch's random state: torch is the only source of randomness in a trainer."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def _write_model(folder: Path, learner: Learner, weights: dict[str, Tensor]) -> None:
    policy = learner.policy
    if policy.is_lora:
        policy.save_adapter(folder, weights)
        return
    policy.network.save_pretrained(folder, state_dict=weights)
    # transformers records the precision of the weights in memory (float32), not of those that it wrote
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
