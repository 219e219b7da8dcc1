"""The reference: the initial model, to which KL terms keep the policy close."""

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from agentfactory.trainers.batches.image_batches import Images
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role
from agentfactory.trainers.networks.lora import REFERENCE_ADAPTER, adapters_off, has_adapter
from agentfactory.trainers.networks.network import apply_options, decoder_layers, load_network
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.processes.sharding import weights_of_rank_0


class Reference:
    """A scorer of tokens with the initial weights, by the policy's own code: at the start the two are equal."""

    def __init__(self, accelerator: Accelerator, frozen: Policy | None) -> None:
        """`frozen` is None if the reference is the base of the policy's adapter, without it or with a frozen copy."""
        self._accelerator = accelerator
        self._frozen = frozen

    @property
    def network(self) -> nn.Module | None:
        """The reference's separate network; None if it uses the policy's base."""
        return self._frozen

    @torch.no_grad()
    def logprobs(
        self,
        model: nn.Module,
        ids: Int[Tensor, "batch length"],
        sources: Int[Tensor, "targets"],
        labels: Int[Tensor, "targets"],
        positions: Int[Tensor, "1 length"] | None = None,
        ends: Int[Tensor, "1 length"] | None = None,
        images: Images | None = None,
        temperature: float = 1.0,
    ) -> Float[Tensor, "targets"]:
        """Return the log-probability of each label: see `Policy.forward`. `model` is the model that accelerate
        prepared; its base is used if an adapter is trained, with the adapter that training began with, if any. Its
        adapters and trainable weights are unchanged. Every process calls it."""
        inputs = (ids, sources, labels, positions, ends, images, temperature)
        if self._frozen is not None:
            return self._frozen(*inputs)[0]
        unwrapped = self._accelerator.unwrap_model(model)
        policy = unwrapped.policy if isinstance(unwrapped, ActorCritic) else unwrapped
        role = (Role.POLICY,) if isinstance(unwrapped, ActorCritic) else ()
        assert has_adapter(policy.model)
        continued = REFERENCE_ADAPTER in policy.model.peft_config
        with policy.scoring_with(REFERENCE_ADAPTER) if continued else adapters_off(policy.model):
            return model(*role, *inputs)[0]


def make_reference(recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> Reference:
    """Create the reference of a recipe: the base of the policy's adapter, with a frozen copy of a continued adapter; or
    a frozen copy from `model.path` in the model's dtype, which fsdp2 shards like the policy."""
    if has_adapter(policy.model):
        return Reference(accelerator, None)
    network = load_network(recipe, accelerator.device, policy.dtype)
    apply_options(network, recipe.train, accelerator.device)
    network.requires_grad_(False)
    frozen = Policy(network, policy.dtype, banned=policy.banned).eval()
    if recipe.train.strategy == "fsdp2":
        with weights_of_rank_0(frozen):
            # reshard after the forward pass, unlike a root: there is no backward pass that would free it
            for unit in (*decoder_layers(network), frozen):
                fully_shard(unit, reshard_after_forward=True)
    return Reference(accelerator, frozen)
