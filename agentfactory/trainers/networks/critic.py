"""The critic: state values for GAE, learned in one model with the policy."""

import copy
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.lora import (
    CRITIC_ADAPTER,
    POLICY_ADAPTER,
    copy_adapter,
    copy_rows,
    has_adapter,
    table_of,
    use_adapter,
)
from agentfactory.trainers.networks.network import Backbone, apply_options, body_of, load_network
from agentfactory.trainers.networks.policy import Policy


class Role(StrEnum):
    POLICY = "policy"
    CRITIC = "critic"


def role_of(name: str) -> Role:
    return Role.CRITIC if name.startswith("critic.") or CRITIC_ADAPTER in name.split(".") else Role.POLICY


class Critic(nn.Module):
    """A scalar head in float32, and the network below it unless it uses the policy's base."""

    def __init__(self, width: int, backbone: Backbone | None) -> None:
        """`width` is the size of the hidden states; `backbone` is None for an adapter on the policy's base."""
        super().__init__()
        self.backbone = backbone
        # zero: the first values are 0, so the first advantages are those of the returns alone. A vector, not a matrix
        # with one row: it is sharded evenly, does not decay, and is not passed to optimisers that work on matrices
        self.head = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: Float[Tensor, "targets width"]) -> Float[Tensor, "targets"]:
        # fsdp2 gathers the head in the network's precision, but values are computed in float32
        dtype = torch.promote_types(self.head.dtype, torch.float32)
        return hidden.to(dtype) @ self.head.to(dtype)


class ActorCritic(nn.Module):
    """Policy and critic as children of one module, which accelerate prepares. Each role's forward and backward pass run
    separately: with adapters both share one base, and the forward pass switches the adapter in use."""

    def __init__(self, policy: Policy, critic: Critic) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def _no_split_modules(self) -> list[str]:
        # accelerate makes each module of these classes an FSDP2 unit; the critic's network has the same classes
        return self.policy._no_split_modules

    def forward(self, role: Role, *inputs: Any, **named: Any) -> tuple[Float[Tensor, "targets"], ...] | Tensor:
        """For the policy, return the result of `Policy.forward`; for the critic, the value of the state in which each
        label is sampled. A backward pass raises RuntimeError if the other role's forward pass came in between."""
        if role == Role.POLICY:
            return tuple(map(self._guarded, self.policy(*inputs, **named)))
        (ids, sources, _, *places), base = inputs, self.critic.backbone or self.policy
        if has_adapter(base.model):
            use_adapter(base.model, CRITIC_ADAPTER)
        return self._guarded(self.critic(base.hidden(ids, *places).flatten(0, 1)[sources]))

    def parameters_of(self, role: Role) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if p.requires_grad and role_of(name) == role]

    def _guarded(self, output: Tensor) -> Tensor:
        model = self.policy.model
        if has_adapter(model) and output.requires_grad:
            name = model.active_adapter

            def check(gradient: Tensor) -> None:
                if model.active_adapter != name:
                    other = model.active_adapter
                    raise RuntimeError(f"backward pass of adapter {name} after a forward pass of {other}")

            output.register_hook(check)
        return output


def make_actor_critic(
    recipe: TrainRecipe, policy: Policy, device: torch.device | str = "cpu", network: PreTrainedModel | None = None
) -> ActorCritic:
    """Add to `policy`, before it is prepared, a critic whose values are initially 0.

    With `model.lora`, it is a second adapter of the same shape on the policy's base; otherwise a separate network
    (`network`, by default from `model.path`), in float32 and without language-model head."""
    output = table_of(policy.network.get_output_embeddings())
    backbone = None
    if has_adapter(policy.model):
        torch.manual_seed(recipe.seed)
        policy.model.add_adapter(CRITIC_ADAPTER, copy.deepcopy(policy.model.peft_config[POLICY_ADAPTER]))
        copy_rows(policy.network, POLICY_ADAPTER, CRITIC_ADAPTER)
        policy.model.set_requires_grad(CRITIC_ADAPTER)
        if recipe.model.lora is not None and recipe.model.lora.from_ is not None:
            # like a critic of its own network, it begins with the policy's features
            copy_adapter(policy.model, POLICY_ADAPTER, CRITIC_ADAPTER)
    else:
        own: Any = network or load_network(recipe, device)
        apply_options(own, recipe.train, device, policy.batching)
        backbone = Backbone(body_of(own), policy.dtype)
    # under fsdp2 the policy is still on the CPU, whatever `device` is
    return ActorCritic(policy, Critic(output.shape[-1], backbone).to(output.device)).train()
