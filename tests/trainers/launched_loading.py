"""Run in two processes by test_sharding.py: the memory needed to create learners, and their gradients.

Arguments: recipes as a JSON list, a folder for each rank's results.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from agentfactory.base.errors import SettingError
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner


def megabytes(name: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def loss_and_gradients(learner: Learner) -> dict[str, Any]:
    """Return loss and gradients (whole in every rank) of all labels of two rows and of the entropies, and the
    precisions of residual stream and weights in the last layer."""
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
    gradients = {name: _whole(value.grad) for name, value in named if value.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "used": set(used)}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    """Save each recipe's additional memory for its learner in MB, and the learner's gradients, or its refusal."""
    recipes = [TrainRecipe.model_validate(recipe) for recipe in json.loads(sys.argv[1])]
    accelerator = make_accelerator(recipes[0])
    found: list[dict[str, Any]] = []
    for recipe in recipes:
        before = megabytes("VmRSS")
        # measure the peak from here on
        Path("/proc/self/clear_refs").write_text("5")
        try:
            learner = Learner(recipe, accelerator)
        except SettingError as error:
            found.append({"refused": str(error)})
            continue
        memory = {"peak": megabytes("VmHWM") - before, "kept": megabytes("VmRSS") - before}
        found.append({**memory, **loss_and_gradients(learner)})
        del learner
        accelerator.free_memory()
        # the next network's layers have another class
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
        accelerator.state.fsdp_plugin.auto_wrap_policy = transformer_auto_wrap_policy
    torch.save(found, Path(sys.argv[2]) / f"rank-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
