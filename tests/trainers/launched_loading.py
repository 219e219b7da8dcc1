"""The memory needed to create a learner, and its gradients, on one process or two: see test_sharding.py."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from agentfactory.base.errors import SettingError
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from tests.trainers.ranks import whole
from tests.untrained_tokens import make_needs


def megabytes(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def loss_and_gradients(learner: Learner) -> dict[str, Any]:
    """Return loss and gradients (whole in every rank), and the precisions that the last layer computed in."""
    used = []

    def note(layer: nn.Module, inputs: Any) -> None:
        used.extend([inputs[0].dtype, *(weight.dtype for weight in layer.parameters())])

    learner.policy.network.base_model.layers[-1].register_forward_pre_hook(note)
    ids = torch.arange(24).reshape(2, 12) % 50
    sources = torch.arange(0, 20, 2)
    logprob, entropy = learner.policy_forward(ids, sources, ids.flatten()[sources + 1], None, None, None, 1.0, True)
    loss = logprob.square().mean() + entropy.mean()
    learner.accelerator.backward(loss)
    named = learner.accelerator.unwrap_model(learner.model).named_parameters()
    gradients = {name: whole(value.grad) for name, value in named if value.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "used": set(used)}


def load(recipe: TrainRecipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the additional memory for a learner in MB, and its gradients; or its refusal."""
    before = megabytes("VmRSS")
    # measure the peak from here on
    Path("/proc/self/clear_refs").write_text("5")
    try:
        trains_rows = recipe.model.lora is not None
        learner = Learner(recipe, accelerator, needs=make_needs() if trains_rows else None)
    except SettingError as error:
        return {"refused": str(error)}
    memory = {"peak": megabytes("VmHWM") - before, "kept": megabytes("VmRSS") - before}
    return {**memory, **loss_and_gradients(learner)}
