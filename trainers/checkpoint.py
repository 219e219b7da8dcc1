"""Checkpoints: folders that transformers, peft, the server and the next stage load as they are, and that training goes
on from exactly where it was."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedTokenizerBase

from trainers.checkpoint_folder import INFO, checkpoint_path, read_info, written_aside
from trainers.learner import Learner

TRAINING_STATE = "training_state.pt"
"""What training needs and a model does not: trainable weights in float32, optimiser, schedule, random numbers."""


def save_checkpoint(
    folder: Path, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase, info: dict[str, Any]
) -> Path:
    """Writes `folder`/step-000080 (for step 80) aside, makes it durable, then gives it its name; returns its path.

    It holds the model in the transformers format in the policy's dtype, or the adapter in peft's (its
    adapter_config.json names the base), the tokenizer with the chat template that `tokenizer` carries,
    `trainer_state.json` with the step and `info` (JSON, as rank 0 gives it), the training state, and the digests of all
    files. Every process calls it, rank 0 writes, and all return when it is durable.
    Raises FileExistsError where the checkpoint is already there.
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
    """Puts back the trainable weights, the critic's among them, optimiser, schedule and random numbers; returns what
    `trainer_state.json` says. Every process calls it.

    With as many processes as when it was written, training goes on bit by bit as it would have; with another number,
    processes that had no predecessor keep their own random numbers. Raises ValueError where the checkpoint holds other
    weights than are trained.
    """
    state = torch.load(path / TRAINING_STATE, map_location="cpu", weights_only=True, mmap=True)
    held, wanted = state["weights"].keys(), _trainable(learner)
    if held != wanted:
        raise ValueError(f"{path} holds other weights than are trained, such as {sorted(held ^ wanted)[0]}")
    # weights that are not trained, and second names of tied ones, are not in it
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(learner.model, state["weights"], options=options)
    _load_optimizer(learner, state["optimizer"], options)
    # its last step is taken anew: train.steps may have changed, and the course of the learning rate with it
    last = state["schedule"]
    before = {"last_epoch": last["last_epoch"] - 1, "_step_count": last["_step_count"] - 1}
    learner.schedule.load_state_dict({**last, **before})
    learner.schedule.step()
    rank = learner.accelerator.process_index
    if rank < len(state["random"]):
        _set_random_state(state["random"][rank], learner.accelerator.device)
    return read_info(path)


def _load_optimizer(learner: Learner, state: dict[str, Any], options: StateDictOptions) -> None:
    if not state["state"]:
        # plain gradient descent keeps none, and torch refuses to load that
        return
    optimizer = _bare(learner.optimizer)
    set_optimizer_state_dict(learner.model, optimizer, state, options=options)
    # torch makes up a state for weights that had none, such as a policy's while only its critic learns
    for name, weight in learner.accelerator.unwrap_model(learner.model).named_parameters():
        if name not in state["state"]:
            optimizer.state.pop(weight, None)


def _training_state(learner: Learner) -> dict[str, Any]:
    """Whole tensors on the CPU; empty but on rank 0. Every process calls it."""
    random_states = [_random_state(learner.accelerator.device)]
    if learner.accelerator.num_processes > 1:
        own, random_states = random_states[0], [{}] * learner.accelerator.num_processes
        dist.gather_object(own, random_states if learner.accelerator.is_main_process else None)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights, optimizer = get_state_dict(learner.model, _bare(learner.optimizer), options=options)
    names = _trainable(learner)
    return {
        "weights": {name: value for name, value in weights.items() if name in names},
        "optimizer": optimizer,
        "schedule": learner.schedule.state_dict(),
        "random": random_states,
    }


def _trainable(learner: Learner) -> set[str]:
    """Names of the weights that are trained; tied ones have one."""
    module = learner.accelerator.unwrap_model(learner.model)
    return {name for name, value in module.named_parameters() if value.requires_grad}


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch, the only source of chance in a trainer."""
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
    # transformers notes the precision of the weights in memory (float32), not of those it was given to write
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
