"""The reference compared with plain transformers, and with the initial policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks import policy as policy_module
from agentfactory.trainers.networks.critic import ActorCritic, Role, make_actor_critic
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.teachers.teacher import FrozenPolicy, make_reference
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


def test_full_reference_has_the_models_dtype_and_is_not_trained(make_recipe: Make, model_folder: Path) -> None:
    recipe = make_recipe()
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    model, reference = make_model(recipe)
    frozen: Any = reference.network
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    # rotary angles have full precision
    assert {buffer.dtype for buffer in frozen.buffers()} == {torch.float32}
    scores = reference.logprobs(model, *INPUTS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected(model_folder, 1.0).float(), atol=0.3, rtol=0.1)


def test_reference_scores_as_the_policy_does(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    capped = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=2.0, initializer_range=0.5,
    )  # fmt: skip
    Gemma2ForCausalLM(capped).save_pretrained(tmp_path)
    recipe = make_recipe()
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(tmp_path)})})
    model, reference = make_model(recipe)
    whole = reference.logprobs(model, *INPUTS)
    # only eager attention applies the soft cap on scores; its softmax is computed in float32
    torch.testing.assert_close(whole, expected(tmp_path, 1.0, "eager"), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 130)  # two positions of a vocabulary of 64
    assert_equal(reference.logprobs(model, *INPUTS), whole)
