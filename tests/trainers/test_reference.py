"""The reference compared with plain transformers, and with the initial policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role, make_actor_critic
from agentfactory.trainers.networks.frozen_policy import FrozenPolicy, make_reference
from agentfactory.trainers.networks.policy import load_policy
from tests.trainers.conftest import Make, on_cpu
from tests.trainers.float64 import assert_equal, in_float64
from tests.trainers.scored import INPUTS, disturb, scores_of

pytestmark = pytest.mark.numbers


def make_model(recipe: TrainRecipe, critic: bool = False) -> tuple[nn.Module, FrozenPolicy]:
    policy = load_policy(recipe)
    if recipe.model.dtype == "float32":
        in_float64(policy)
    model = make_actor_critic(recipe, policy) if critic else policy
    return model, make_reference(recipe, policy, on_cpu())


def expected(folder: Path, temperature: float, attention: str = "sdpa") -> Tensor:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    network = in_float64(network)
    with torch.no_grad():
        return scores_of(network, temperature)


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("lora", [None, {"rank": 3}])
def test_reference_stays_what_the_policy_began_as(
    make_recipe: Make, model_folder: Path, lora: dict[str, Any] | None, critic: bool
) -> None:
    model, reference = make_model(make_recipe(lora=lora), critic)
    role = (Role.POLICY,) if critic else ()
    first = reference.logprobs(model, *INPUTS, temperature=0.7)
    assert torch.equal(first, model(*role, *INPUTS, temperature=0.7)[0])
    assert_equal(first, expected(model_folder, 0.7))
    disturb(model, 1, size=0.3)
    assert not torch.allclose(first, model(*role, *INPUTS, temperature=0.7)[0], atol=1e-2)
    again = reference.logprobs(model, *INPUTS, temperature=0.7)
    assert torch.equal(again, first)
    assert not again.requires_grad


def test_reference_leaves_both_adapters_as_they_were(make_recipe: Make) -> None:
    model, reference = make_model(make_recipe(lora={"rank": 3}), critic=True)
    assert isinstance(model, ActorCritic)
    disturb(model, 1, size=0.3)
    values, (logprob, _) = model(Role.CRITIC, *INPUTS), model(Role.POLICY, *INPUTS)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    for role, scores in ((Role.CRITIC, values), (Role.POLICY, logprob)):
        model(role, *INPUTS)
        reference.logprobs(model, *INPUTS)
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
        again = model(role, *INPUTS)
        assert torch.equal(again[0] if role == Role.POLICY else again, scores)
