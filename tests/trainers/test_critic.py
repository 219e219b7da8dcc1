"""The critic and the reference beside a policy, compared with separate networks of plain transformers and peft, and
with the initial policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks import policy as policy_module
from agentfactory.trainers.networks.critic import ActorCritic, Role, make_actor_critic, role_of
from agentfactory.trainers.networks.lora import CRITIC_ADAPTER, POLICY_ADAPTER
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.teachers.teacher import FrozenPolicy, make_reference
from tests.placement.shapes import sizes
from tests.trainers.conftest import Make, on_cpu
from tests.trainers.float64 import TOLERANCE, assert_equal, in_float64
from tests.trainers.launched_roles import exercise
from tests.trainers.ranks import on_ranks
from tests.trainers.scored import IDS, INPUTS, TARGETS, disturb, fill_adapters, scores_of

pytestmark = pytest.mark.numbers

LORA = {"rank": 3}
RETURNS = torch.linspace(-1.0, 2.0, len(TARGETS), dtype=torch.float64)


def make_model(recipe: TrainRecipe) -> ActorCritic:
    model = in_float64(make_actor_critic(recipe, load_policy(recipe)))
    fill_adapters(model, 0.3, torch.Generator().manual_seed(1))
    return model


def policy_loss(logprob: Tensor) -> Tensor:
    return -(RETURNS * logprob).sum()


def value_loss(values: Tensor) -> Tensor:
    return 0.5 * (values - RETURNS).square().sum()


def step(model: ActorCritic) -> tuple[Tensor, Tensor]:
    for _ in range(2):
        logprob, _ = model(Role.POLICY, *INPUTS)
        policy_loss(logprob).backward()
        values = model(Role.CRITIC, *INPUTS)
        value_loss(values).backward()
    return logprob.detach(), values.detach()


def gradients(module: nn.Module, keep: str = "") -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None and keep in name}


def hidden_states(network: Any) -> Tensor:
    return network(IDS, output_hidden_states=True).hidden_states[-1].flatten(0, 1)[TARGETS - 1]


def same_gradients(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert given
    for (name, one), other in zip(given.items(), expected.values(), strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm() > 0, name


@pytest.mark.parametrize("lora", [None, LORA])
def test_first_values_are_zero_and_each_weight_has_one_role(make_recipe: Make, lora: dict[str, Any]) -> None:
    recipe = make_recipe(lora=lora, algorithm="ppo")
    alone = {name for name, p in load_policy(recipe).named_parameters() if p.requires_grad}
    model = make_actor_critic(recipe, load_policy(recipe))
    assert torch.equal(model(Role.CRITIC, *INPUTS), torch.zeros(len(TARGETS)))
    names: dict[Role, set[str]] = {role: set() for role in Role}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names[role_of(name)].add(name)
            assert parameter.dtype == torch.float32
    assert names[Role.POLICY] == {f"policy.{name}" for name in alone}
    # as many as the policy has (tied to the head or not, the embeddings are among them), and the scalar head
    assert len(names[Role.CRITIC]) == len(alone) + 1
    assert not any("lm_head" in name for name in names[Role.CRITIC])
    assert sum(p.numel() for p in model.parameters_of(Role.CRITIC)) == 32 + sum(
        p.numel() for p in model.parameters_of(Role.POLICY)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_equal_networks(make_recipe: Make, model_folder: Path, tmp_path: Path, checkpointing: bool) -> None:
    model = make_model(make_recipe(lora=LORA, algorithm="ppo", gradient_checkpointing=checkpointing))
    shared: Any = model.policy.model
    shared.save_pretrained(tmp_path)
    logprob, values = step(model)

    def load(folder: Path) -> Any:
        network = in_float64(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))
        return PeftModel.from_pretrained(network, folder, is_trainable=True, autocast_adapter_dtype=False)

    # peft writes the adapter "default" to the folder itself, others to folders of their names
    actor, critic = load(tmp_path), load(tmp_path / CRITIC_ADAPTER)
    head = model.critic.head.detach().clone().requires_grad_()
    for _ in range(2):
        expected_logprob = scores_of(actor)
        policy_loss(expected_logprob).backward()
        expected_values = hidden_states(critic) @ head
        value_loss(expected_values).backward()
    assert_equal(logprob, expected_logprob)
    assert_equal(values, expected_values)
    assert_equal(model.critic.head.grad, head.grad)
    for adapter, separate in ((POLICY_ADAPTER, actor), (CRITIC_ADAPTER, critic)):
        same_gradients(gradients(shared, f".{adapter}."), gradients(separate))
    merged = critic.merge_and_unload()
    with torch.no_grad():
        assert_equal(values, hidden_states(merged) @ head)


def test_full_critic_is_a_network_of_its_own(make_recipe: Make, model_folder: Path) -> None:
    model = make_model(make_recipe(algorithm="ppo"))
    logprob, values = step(model)
    load = AutoModelForCausalLM.from_pretrained
    actor, critic = (in_float64(load(model_folder, dtype=torch.float32)) for _ in range(2))
    head = model.critic.head.detach().clone().requires_grad_()
    for _ in range(2):
        policy_loss(scores_of(actor)).backward()
        expected_values = hidden_states(critic) @ head
        value_loss(expected_values).backward()
    assert_equal(values, expected_values)
    assert torch.isfinite(logprob).all()
    for given, expected in ((model.policy, actor), (model.critic.backbone, critic)):
        same_gradients(gradients(given), gradients(expected))
    assert_equal(model.critic.head.grad, head.grad)


def test_backward_pass_under_the_other_adapter_is_refused(make_recipe: Make) -> None:
    model = make_model(make_recipe(lora=LORA, algorithm="ppo"))
    logprob, _ = model(Role.POLICY, *INPUTS)
    values = model(Role.CRITIC, *INPUTS)
    with pytest.raises(RuntimeError, match="backward pass of adapter default after a forward pass of critic"):
        policy_loss(logprob).backward()
    value_loss(values).backward()


@pytest.mark.parametrize("lora", [None, LORA])
def test_what_stands_between_sampled_tokens_has_no_value(make_recipe: Make, lora: dict[str, Any]) -> None:
    model = make_model(make_recipe(lora=lora, algorithm="ppo"))
    values = model(Role.CRITIC, *INPUTS)
    value_loss(values).backward()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    elsewhere = torch.ones(IDS.numel(), dtype=torch.bool)
    elsewhere[TARGETS - 1] = False

    def poison(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.masked_fill(elsewhere.reshape(*IDS.shape, 1), torch.nan)
        return output

    base = model.critic.backbone or model.policy
    with base.network.base_model.register_forward_hook(poison):
        poisoned = model(Role.CRITIC, *INPUTS)
        value_loss(poisoned).backward()
    assert torch.equal(poisoned, values)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    # tokens after the last sampled token are not context of any target
    changed = IDS.clone()
    changed[0, 11], changed[1, 8:] = 63, 63
    with torch.no_grad():
        assert_equal(model(Role.CRITIC, changed, *INPUTS[1:]), values)


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(make_recipe: Make, tmp_path: Path, strategy: str) -> None:
    before = load_policy(make_recipe(lora=LORA))
    before.save_adapter(tmp_path / "adapter", before.gather())
    # the last one continues an adapter, of which a frozen copy is the reference
    continued = {"lora": {**LORA, "from": str(tmp_path / "adapter")}, "loss": {"kl": {"coefficient": 0.1}}}
    settings = [{"lora": LORA, "gradient_checkpointing": True}, {}, continued]
    one = [exercise(make_recipe(**changed, algorithm="ppo"), on_cpu()) for changed in settings]
    recipes = [make_recipe(**changed, algorithm="ppo", processes=2, strategy=strategy) for changed in settings]
    for given, expected in zip(on_ranks(exercise, recipes, tmp_path, strategy)[0], one, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(given["after the critic's"]["reference"], given["before"]["reference"])
        # a step of the critic alone gives the policy no gradient, and leaves it unchanged
        names = [name for name, gradient in given["critic's gradients"].items() if gradient is not None]
        assert names
        assert all(role_of(name) == Role.CRITIC for name in names)
        assert torch.equal(given["after"]["policy"], given["after the critic's"]["policy"])


# ---- the reference


def make_both(recipe: TrainRecipe, critic: bool = False) -> tuple[nn.Module, FrozenPolicy]:
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
def test_reference_stays(make_recipe: Make, model_folder: Path, lora: dict[str, Any] | None, critic: bool) -> None:
    model, reference = make_both(make_recipe(lora=lora), critic)
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
    model, reference = make_both(make_recipe(lora={"rank": 3}), critic=True)
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
    model, reference = make_both(recipe)
    frozen: Any = reference.network
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    # rotary angles have full precision
    assert {buffer.dtype for buffer in frozen.buffers()} == {torch.float32}
    scores = reference.logprobs(model, *INPUTS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected(model_folder, 1.0).float(), atol=0.3, rtol=0.1)


def test_reference_scores_as_a_policy_does(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own = {"head_dim": 16, "final_logit_softcapping": 2.0, "initializer_range": 0.5}
    Gemma2ForCausalLM(Gemma2Config(**sizes(32, 32, 2, 2, 2, 64), **own)).save_pretrained(tmp_path)
    recipe = make_recipe()
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(tmp_path)})})
    model, reference = make_both(recipe)
    whole = reference.logprobs(model, *INPUTS)
    # only eager attention applies the soft cap on scores; its softmax is computed in float32
    torch.testing.assert_close(whole, expected(tmp_path, 1.0, "eager"), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 130)  # two positions of a vocabulary of 64
    assert_equal(reference.logprobs(model, *INPUTS), whole)
