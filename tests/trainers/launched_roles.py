"""Passes of policy, critic and reference, on one process or two: see test_critic.py."""

import contextlib
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import Role, make_actor_critic
from agentfactory.trainers.networks.fp8 import gather_in_fp8
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.processes.accelerator import weights_of_rank_0
from agentfactory.trainers.teachers.teacher import make_reference
from tests.trainers.ranks import whole
from tests.trainers.scored import fill_adapters


def exercise(recipe: TrainRecipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the gradients of both roles over four micro-batches, divided over the processes; scores after an update of
    both, and after one of the critic alone; and a state that was saved and restored."""
    model = make_actor_critic(recipe, load_policy(recipe, accelerator.device), accelerator.device)
    names = [name for name, _ in model.named_parameters()]
    generator = torch.Generator().manual_seed(1)
    fill_adapters(model, 0.3, generator)
    # with momentum, a gradient that is zero instead of absent would move weights in a later step
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with weights_of_rank_0(model) if accelerator.is_fsdp2 else contextlib.nullcontext():
        prepared, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.is_fsdp2 and recipe.train.precision != "auto":
        gather_in_fp8(prepared)
    model = accelerator.unwrap_model(prepared)
    reference = make_reference(recipe, model.policy, accelerator)
    parts = torch.randint(64, (4, 2, 9), generator=generator)
    sources = torch.tensor([2, 3, 6, 11, 12])

    def inputs(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ids, sources, ids.flatten()[sources + 1]

    def backward(roles: list[Role]) -> None:
        share = parts[accelerator.process_index :: accelerator.num_processes]
        for index, ids in enumerate(share):
            for role in roles:
                last = index == len(share) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(prepared):
                    output = prepared(role, *inputs(ids))
                    scores = output[0] if role == Role.POLICY else output
                    accelerator.backward((scores - 1.0).square().mean() / len(parts) * accelerator.num_processes)

    def gradients() -> dict[str, Tensor | None]:
        return {name: whole(p.grad) for name, p in zip(names, model.parameters(), strict=True)}

    @torch.no_grad()
    def scores() -> dict[str, Tensor]:
        return {
            "reference": reference.logprobs(prepared, *inputs(parts[0]), temperature=0.7),
            "value": prepared(Role.CRITIC, *inputs(parts[0])),
            "policy": prepared(Role.POLICY, *inputs(parts[0]), temperature=0.7)[0],
        }

    found: dict[str, Any] = {"before": scores()}
    backward([Role.POLICY, Role.CRITIC])
    found["gradients"] = gradients()
    found["norms"] = [float(accelerator.clip_grad_norm_(model.parameters_of(role), 0.1)) for role in Role]
    optimizer.step()
    optimizer.zero_grad()
    found["after"] = scores()
    backward([Role.CRITIC])
    found["critic's gradients"] = gradients()
    optimizer.step()
    optimizer.zero_grad()
    found["after the critic's"] = scores()
    found["trained"] = [p.requires_grad for p in model.parameters()]
    found["adapter"] = dict(model.policy.gather())
    return found
