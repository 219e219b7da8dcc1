"""The policy against plain transformers and peft."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

from trainers import policy as policy_module
from trainers.config import TrainRecipe
from trainers.policy import Policy, load_policy

IDS = torch.arange(24).reshape(2, 12) % 60
TARGETS = torch.tensor([3, 4, 9, 14, 23])


def score(policy: Policy, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies at TARGETS."""
    return policy(IDS, TARGETS - 1, IDS.flatten()[TARGETS], temperature=temperature)


def reference(network: torch.nn.Module, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same from all logits of a plain transformers model."""
    distribution = torch.distributions.Categorical(logits=network(IDS).logits.flatten(0, 1)[TARGETS - 1] / temperature)
    return distribution.log_prob(IDS.flatten()[TARGETS]), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_plain_transformers(
    make_recipe: Callable[..., TrainRecipe], model_folder: Path, temperature: float
) -> None:
    policy = load_policy(make_recipe())
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for given, expected in zip(score(policy, temperature), reference(network, temperature), strict=True):
        torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-6)


def test_chunks_change_nothing(make_recipe: Callable[..., TrainRecipe], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (load_policy(make_recipe()) for _ in range(2))
    expected = score(whole)
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 130)  # two positions of a vocabulary of 64
    given = score(chunked)
    torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-6)
    expected[0].sum().backward()
    given[0].sum().backward()
    for one, other in zip(whole.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_keeps_weights_and_scores_in_float32(make_recipe: Callable[..., TrainRecipe]) -> None:
    recipe = make_recipe()
    recipe.model.dtype = "bfloat16"
    policy = load_policy(recipe)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    logprob, entropy = score(policy)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob, score(load_policy(make_recipe()))[0], atol=0.3, rtol=0.1)
    assert {value.dtype for value in policy.gather().values()} == {torch.bfloat16}


def test_gather_has_transformers_names_and_tied_weights_once(make_recipe: Callable[..., TrainRecipe]) -> None:
    state = load_policy(make_recipe()).gather()
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state
    assert "model.layers.1.self_attn.q_proj.weight" in state


def test_adapter_is_loaded_by_peft(make_recipe: Callable[..., TrainRecipe], model_folder: Path, tmp_path: Path) -> None:
    policy = load_policy(make_recipe(lora={"rank": 3, "dropout": 0.5}))
    trainable = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    policy.eval()
    state = policy.gather()
    policy.save_adapter(tmp_path, state)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(network, tmp_path)
    assert loaded.peft_config["default"].lora_alpha == 6
    torch.testing.assert_close(score(policy), reference(loaded), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(score(policy)[0], score(load_policy(make_recipe()))[0], atol=1e-3)


def test_only_the_adapters_dropout_follows_training(make_recipe: Callable[..., TrainRecipe]) -> None:
    policy = load_policy(make_recipe(lora={"rank": 2, "dropout": 0.5}))
    training = {name for name, module in policy.named_modules() if module.training and name}
    assert training
    assert all("lora_dropout" in name for name in training)


def test_seed_decides_the_adapter(make_recipe: Callable[..., TrainRecipe]) -> None:
    recipe = make_recipe(lora={"rank": 2})
    first, again, other = (load_policy(recipe.model_copy(update={"seed": seed})).gather() for seed in (1, 1, 2))
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_refusals_name_the_field(make_recipe: Callable[..., TrainRecipe], tmp_path: Path) -> None:
    half = make_recipe()
    half.model.dtype = "float16"
    with pytest.raises(ValueError, match=r"model.dtype: float16"):
        load_policy(half)
    policy = load_policy(make_recipe(lora={"rank": 2}))
    policy.save_adapter(tmp_path / "adapter", policy.gather())
    recipe = make_recipe()
    recipe.model.path = str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"model.path: .* LoRA adapter"):
        load_policy(recipe)
    scaled = GraniteConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=4.0, initializer_range=0.5,
    )  # fmt: skip
    GraniteForCausalLM(scaled).save_pretrained(tmp_path / "granite")
    recipe.model.path = str(tmp_path / "granite")
    with pytest.raises(ValueError, match=r"model.path: GraniteForCausalLM changes its logits"):
        load_policy(recipe)
