"""FP8 under fsdp2, on one process or two: see test_fp8.py."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.fp8 import in_high_precision
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import TRAINING_STATE, load_state, part_of, write_part
from tests.trainers.launched_loading import loss_and_gradients
from tests.trainers.ranks import forget


def step(learner: Learner) -> dict[str, Any]:
    found = loss_and_gradients(learner)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return found


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.policy.gather().items()}


def train(learner: Learner, state: Path | None = None) -> dict[str, Any]:
    gathered: set[bool] = set()

    def note(module: torch.nn.Module, inputs: Any) -> None:
        gathered.add(isinstance(module.weight, Float8TrainingTensor))

    # a base layer of an adapter, or a plain layer
    layer = learner.policy.network.base_model.layers[0].self_attn.q_proj
    getattr(layer, "base_layer", layer).register_forward_pre_hook(note)
    ids, sources = torch.arange(24).reshape(2, 12), torch.arange(0, 20, 2)
    with torch.no_grad(), in_high_precision(learner.policy):
        plain = learner.policy_forward(ids, sources, ids.flatten()[sources + 1])[0]
    first = step(learner)
    if state is not None:
        part = {name: value.cpu() for name, value in part_of(learner).items()}
        write_part(part, state / TRAINING_STATE, torch.distributed.group.WORLD)
    second = step(learner)
    return {"first": first, "second": second, "weights": weights(learner), "gathered": gathered, "plain": plain}


def resume(learner: Learner, state: Path) -> dict[str, Any]:
    loss_and_gradients(learner)
    learner.optimizer.zero_grad()
    load_state(state, learner)
    return {"second": step(learner), "weights": weights(learner)}


def train_and_resume(recipe: TrainRecipe, accelerator: Accelerator, folder: Path) -> tuple[dict[str, Any], ...]:
    state, found = folder / f"{recipe.model.lora is not None}", []
    for run in (train, resume):
        found.append(run(Learner(recipe, accelerator), state))
        forget(accelerator)
    return tuple(found)
