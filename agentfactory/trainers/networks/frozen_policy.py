"""Policies that are not trained: the reference, to which KL terms keep the policy close, and teachers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role
from agentfactory.trainers.networks.fp8 import gather_in_fp8
from agentfactory.trainers.networks.lora import REFERENCE_ADAPTER, adapters_off, has_adapter
from agentfactory.trainers.networks.network import apply_options, decoder_layers, load_network
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.processes.sharding import weights_of_rank_0


class FrozenPolicy:
    """A scorer of tokens whose weights do not change, by the policy's own code: with equal weights the two are equal.

    Every process calls its methods, which leave the adapters and trainable weights of `model` unchanged. `model` is the
    model that accelerate prepared; the further inputs are those of `Policy.forward`."""

    def __init__(self, accelerator: Accelerator, frozen: Policy | None, adapter: str | None = None) -> None:
        """`frozen` is None if the weights are the base of the policy's adapter, alone or with `adapter`: a frozen one,
        or POLICY_ADAPTER for the policy as it is now."""
        self._accelerator = accelerator
        self.network = frozen
        """The separate network; None if the policy's base is used."""
        self._adapter = adapter

    @torch.no_grad()
    def forward(self, model: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        if self.network is not None:
            return self.network(*inputs, **named)  # type: ignore[no-any-return]
        role = (Role.POLICY,) if isinstance(self._accelerator.unwrap_model(model), ActorCritic) else ()
        with self._in_use(model):
            return model(*role, *inputs, **named)  # type: ignore[no-any-return]

    def logprobs(self, model: nn.Module, *inputs: Any, **named: Any) -> Float[Tensor, "targets"]:
        return self.forward(model, *inputs, **named)[0]

    @torch.no_grad()
    def states(
        self, model: nn.Module, ids: Int[Tensor, "batch length"], sources: Int[Tensor, "targets"], *places: Any
    ) -> Float[Tensor, "targets width"]:
        """Return the hidden state that predicts each target, for `logits`. Not for a frozen adapter, nor for fsdp2."""
        with self._in_use(model) as policy:
            return policy.hidden(ids, *places).flatten(0, 1)[sources]

    @torch.no_grad()
    def logits(
        self, model: nn.Module, hidden: Float[Tensor, "chunk width"], temperature: float = 1.0
    ) -> Float[Tensor, "chunk vocabulary"]:
        with self._in_use(model) as policy:
            return policy.logits(hidden, temperature)

    @contextmanager
    def _in_use(self, model: nn.Module) -> Iterator[Policy]:
        if self.network is not None:
            yield self.network
            return
        policy: Any = self._accelerator.unwrap_model(model)
        policy = policy.policy if isinstance(policy, ActorCritic) else policy
        with policy.scoring_with(self._adapter) if self._adapter is not None else adapters_off(policy.model):
            yield policy


def make_reference(recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> FrozenPolicy:
    """Create the reference: the base of the policy's adapter, with a copy of a continued one, or `model.path`."""
    if has_adapter(policy.model):
        continued = REFERENCE_ADAPTER in policy.model.peft_config
        return FrozenPolicy(accelerator, None, REFERENCE_ADAPTER if continued else None)
    network = load_network(recipe, accelerator.device, policy.dtype)
    return freeze(network, recipe, policy, accelerator)


def freeze(network: PreTrainedModel, recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> FrozenPolicy:
    """Create a frozen policy from a network that `load_network` loaded in the dtype of `policy`, sharded like that."""
    apply_options(network, recipe.train, accelerator.device)
    network.requires_grad_(False)
    frozen = Policy(network, policy.dtype, banned=policy.banned).eval()
    if recipe.train.strategy == "fsdp2":
        with weights_of_rank_0(frozen):
            # reshard after the forward pass, unlike a root: there is no backward pass that would free it
            for unit in (*decoder_layers(network), frozen):
                fully_shard(unit, reshard_after_forward=True)
        if recipe.train.precision != "auto":
            gather_in_fp8(frozen)
    return FrozenPolicy(accelerator, frozen)
