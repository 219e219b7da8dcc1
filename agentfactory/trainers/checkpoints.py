"""Checkpoints: folders that transformers, peft, the server and the next stage load unchanged, and from which training
resumes exactly. `Checkpoints` writes those of a run when they are due, keeps the newest and the best, and resumes from
them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
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

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.best_checkpoint import AUTO, figure, find_best, metric_names
from agentfactory.trainers.checkpoint_folder import (
    INFO,
    ONLY_BEST,
    checkpoint_path,
    checkpoints,
    flush,
    prune,
    read_info,
    written_aside,
)
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.learner import Learner
from agentfactory.trainers.train_state import TrainState

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


class Checkpoints:
    """Loads and saves the weights of a training loop. Every process has one."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        train: TrainConfig,
        info: dict[str, Any] | None = None,
        files: Callable[[], Mapping[str, Path]] = dict,
        resume: Path | None = None,
    ) -> None:
        """`info` (JSON) is added to each checkpoint. `files` are the files that the run appends to: a checkpoint
        records their lengths, so that a resumed run can cut what came after. `resume` is the checkpoint to continue
        from."""
        self.train_state = TrainState.from_json(read_info(resume)) if resume else TrainState()
        self.path = resume
        """The newest checkpoint."""
        self.saved_step = self.train_state.step
        self._folder = folder
        self._tokenizer = tokenizer
        self._train = train
        self._info = info or {}
        self._files = files
        self._resume = resume

    def due(self, step: int) -> bool:
        """Return whether the recipe asks for a checkpoint of `step`."""
        every = self._train.checkpoint_every
        return step == self._train.steps or (every > 0 and step % every == 0)

    def is_best(self, accelerator: Accelerator) -> bool:
        """Return, in all ranks, rank 0's answer whether the last finished step was evaluated and is the best so far by
        `train.keep_best`. Every process calls it."""
        answer = [False]
        if accelerator.is_main_process and self.train_state.evaluated == self.train_state.step > 0:
            names = [name for name in metric_names(self._train.keep_best) if name in self.train_state.after]
            value = figure(self.train_state.after, names[0]) if names else None
            if value is not None and (self.train_state.best is None or value > self.train_state.best):
                self.train_state.best, answer = value, [True]
        if accelerator.num_processes > 1:
            dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def restore(self, learner: Learner) -> None:
        """Restore `learner` from the resumed checkpoint; every process calls it. Does nothing in a new run."""
        if self._resume:
            load_checkpoint(self._resume, learner)

    def save(self, learner: Learner, only_best: bool = False) -> None:
        """Write a checkpoint of the last finished step, and delete those that the recipe does not keep. Every process
        calls it; returns when the checkpoint is durable.

        With `only_best`, the checkpoint is kept as long as it is the best.

        Raises ValueError if train.keep_best names a metric that the run does not have.
        """
        main, step = learner.accelerator.is_main_process, self.train_state.step
        info: dict[str, Any] = {}
        if main:
            files = self._files()
            sizes = {name: file.stat().st_size for name, file in files.items()}
            for file in files.values():
                # the checkpoint depends on it
                flush(file)
            info = {**self._info, **self.train_state.to_json(), "files": sizes, ONLY_BEST: only_best}
        self.path = save_checkpoint(self._folder, step, learner, self._tokenizer, info)
        self.saved_step = step
        if main:
            self._check_keep_best()
            best = find_best(checkpoints(self._folder), self._train.keep_best)
            prune(self._folder, self._train.keep_last, best.path if best else None)

    def _check_keep_best(self) -> None:
        wanted, train_state = self._train.keep_best, self.train_state
        if wanted == AUTO:
            return
        known = {*train_state.metrics, *train_state.after}
        not_yet = train_state.evaluated is None and wanted is not None and wanted.startswith("eval/")
        if wanted is not None and wanted not in known and not not_yet:
            problem = f"the run has no metric {wanted!r}"
            raise SettingError("train.keep_best", problem, f"name one of {', '.join(sorted(known))}")
