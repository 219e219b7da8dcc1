"""Training of adapters: on another one, also of peft's, and on a 4-bit base by QLoRA on the CPU, which bitsandbytes
supports, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.commands.export_command import export
from agentfactory.launching.merging import merge_adapter
from agentfactory.rollout.config import LoraConfig as RecipeLora
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.critic import Role, make_actor_critic
from agentfactory.trainers.networks.lora import add_adapter, add_reference_adapter, tables_of
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.teachers.teacher import make_reference
from tests.placement.shapes import sizes
from tests.trainers.conftest import Make, make_groups, on_cpu
from tests.trainers.resumed import train_twice
from tests.trainers.scored import IDS, INPUTS, disturb, fill_adapters, score, scores_of

pytestmark = pytest.mark.numbers

KL: dict[str, Any] = {"kl": {"coefficient": 0.1}}


def test_a_reference_is_frozen_and_all_adapters_are_in_float32() -> None:
    """With its rows, too: peft 0.21.2 would train those of any adapter that it casts."""
    network = Qwen3ForCausalLM(Qwen3Config(**sizes(16, 32, 1, 2, 1, 64))).bfloat16()
    tokens = tables_of(network, [3, 5])
    model = add_adapter(network, RecipeLora(rank=2), "all-linear", 0, tokens)
    add_reference_adapter(model)
    adapters = {name: own for name, own in model.named_parameters() if {"default", "reference"} & {*name.split(".")}}
    assert {weight.dtype for weight in adapters.values()} == {torch.float32}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name in adapters if "reference" not in name}
    assert sum("trainable_tokens_delta.reference" in name for name in adapters) == len(tokens)


@pytest.fixture
def trained(make_recipe: Make, tmp_path: Path) -> tuple[Path, Policy]:
    policy = load_policy(make_recipe(lora={"rank": 3}))
    disturb(policy, 3)
    policy.save_adapter(tmp_path / "adapter", dict(policy.gather().stream()))
    return tmp_path / "adapter", policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_and_its_reference_begin_as_the_other(make_recipe: Make, trained: tuple[Path, Policy], dtype: Any) -> None:
    folder, before = trained
    recipe = make_recipe(lora={"rank": 3, "from": str(folder)}, loss=KL)
    recipe.model.dtype = dtype
    policy = load_policy(recipe)
    if dtype == "float32":
        torch.testing.assert_close(score(policy), score(before), atol=0, rtol=0)
    reference = make_reference(recipe, policy, on_cpu())
    assert reference.network is None, "no second network"
    began = reference.logprobs(policy, *INPUTS)
    assert torch.equal(began, score(policy)), "the KL divergence of the first step is exactly 0"
    names = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert names == {name for name, weight in before.named_parameters() if weight.requires_grad}
    disturb(policy, 4)
    assert (score(policy) - began).abs().max() > 0.01
    assert torch.equal(reference.logprobs(policy, *INPUTS), began)
    saved = load_file(folder / "adapter_model.safetensors")
    assert dict(policy.gather().stream()).keys() == saved.keys(), "it is neither saved nor sent"
    without = load_policy(make_recipe(lora={"rank": 3, "from": str(folder)}))
    assert not any(".reference." in name for name, _ in without.named_parameters())


def test_a_critic_begins_with_the_policys_features(make_recipe: Make, trained: tuple[Path, Policy]) -> None:
    recipe = make_recipe(lora={"rank": 3, "from": str(trained[0])}, algorithm="ppo", loss=KL)
    model = make_actor_critic(recipe, load_policy(recipe))
    with torch.no_grad():
        model.critic.head.fill_(1.0)
        values = model(Role.CRITIC, *INPUTS)
        # the active adapter is the policy's again
        model(Role.POLICY, *INPUTS)
        expected = model.policy.hidden(IDS).flatten(0, 1)[INPUTS[1]].sum(-1)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-5)


def test_adapters_of_another_network_are_refused_by_a_tensor(make_recipe: Make, trained: tuple[Path, Policy]) -> None:
    for lora, named in (({"rank": 3, "target_modules": ["q_proj"]}, "nothing"), ({"rank": 2}, r"\(3, ")):
        recipe = make_recipe(lora={**lora, "from": str(trained[0])})
        with pytest.raises(SettingError, match=rf"model\.lora\.from: .*{named}"):
            load_policy(recipe)


@pytest.mark.extended
def test_training_resumes_exactly_within_the_second_run(
    make_recipe: Make, trained: tuple[Path, Policy], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    course = {"batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 1, "steps": 3}
    recipe = make_recipe(lora={"rank": 3, "from": str(trained[0])}, algorithm="ppo", loss=KL, **course)
    whole, *folders = train_twice(recipe, make_groups(6, 4), tokenizer, tmp_path, resume_at=1)
    assert whole[0]["kl"] == 0
    assert whole[1]["kl"] > 0
    last, again = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert last.keys() == again.keys() == load_file(trained[0] / "adapter_model.safetensors").keys()
    assert all(torch.equal(last[name], again[name]) for name in last)


OF_PEFT: dict[str, dict[str, Any]] = {
    "other names": {"target_modules": ["q_proj", "down_proj"], "r": 5, "lora_alpha": 7},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 4},
    "dora": {"target_modules": ["v_proj"], "use_dora": True},
    "a saved embedding": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "ranks of their own": {"target_modules": ["v_proj", "q_proj"], "rank_pattern": {"q_proj": 2}},
}


@pytest.fixture
def of_peft(model_folder: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Tensor]]:
    """Return the folder of an adapter that peft alone made, and its scores."""

    def make(kind: str) -> tuple[Path, Tensor]:
        network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        model: Any = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **OF_PEFT[kind]))
        disturb(model, 5)
        model.save_pretrained(tmp_path / "peft")
        return tmp_path / "peft", scores_of(model)

    return make


@pytest.mark.parametrize("kind", ["other names", "rslora"])
def test_plain_adapters_of_peft_are_continued(make_recipe: Make, of_peft: Any, kind: str, tmp_path: Path) -> None:
    folder, expected = of_peft(kind)
    made = OF_PEFT[kind]
    lora = {"rank": made.get("r", 8), "alpha": made["lora_alpha"], "target_modules": made["target_modules"]}
    policy = load_policy(make_recipe(lora={**lora, "from": str(folder)}))
    torch.testing.assert_close(score(policy), expected, atol=1e-5, rtol=0)
    # saved again, anybody reads it in the same way
    policy.save_adapter(tmp_path / "again", dict(policy.gather().stream()))
    network = AutoModelForCausalLM.from_pretrained(policy.network.name_or_path, dtype=torch.float32)
    again = scores_of(PeftModel.from_pretrained(network, tmp_path / "again"))
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", OF_PEFT)
def test_every_adapter_of_peft_is_merged(model_folder: Path, of_peft: Any, kind: str, tmp_path: Path) -> None:
    folder, expected = of_peft(kind)
    assert merge_adapter(folder, str(model_folder), "float32", tmp_path / "merged") == "merged in float32"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores_of(merged), expected, atol=1e-5, rtol=0)
    assert (expected - scores_of(AutoModelForCausalLM.from_pretrained(model_folder))).abs().max() > 0.01


def test_an_adapter_on_tied_embeddings_is_merged_into_an_untied_network(model_folder: Path, tmp_path: Path) -> None:
    """The adapter changes the input alone; added to the shared table, it would change the head, too."""
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model: Any = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj", "embed_tokens"]))
    disturb(model, 5)
    model.save_pretrained(tmp_path / "peft")
    expected = scores_of(model)
    merge_adapter(tmp_path / "peft", str(model_folder), "float32", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not merged.config.tie_word_embeddings
    torch.testing.assert_close(scores_of(merged), expected, atol=1e-5, rtol=0)


# ---- QLoRA equals an adapter on the dequantised base


NF4 = {"rank": 4, "quantization": "nf4"}


@pytest.fixture(scope="module")
def wide_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(model_folder, **sizes)).save_pretrained(folder)
    return folder


def dequantised(recipe: TrainRecipe, folder: Path) -> TrainRecipe:
    """Return the same recipe, with the 4-bit base saved dequantised in its own precision."""
    load_network(recipe).dequantize().save_pretrained(folder)
    lora = recipe.model.lora.model_copy(update={"quantization": None})
    model = recipe.model.model_copy(update={"path": str(folder), "lora": lora})
    return recipe.model_copy(update={"model": model})


def gradients(policy: Policy) -> dict[str, Tensor]:
    score(policy).sum().backward()
    found = {name: weight.grad for name, weight in policy.named_parameters() if weight.requires_grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(("dtype", "train"), [("float32", {}), ("bfloat16", {"gradient_checkpointing": True})])
def test_equals_an_adapter_on_its_dequantised_base(
    make_recipe: Make, wide_folder: Path, tmp_path: Path, dtype: Any, train: dict[str, Any]
) -> None:
    """Compare gradients after passes without gradients: on some CPUs, bitsandbytes then uses another kernel, which has
    none."""
    recipe = make_recipe(lora=NF4, **train)
    recipe.model.path, recipe.model.dtype = str(wide_folder), dtype
    policy, plain = load_policy(recipe), load_policy(dequantised(recipe, tmp_path / "dequantised"))
    for each in (policy, plain):
        fill_adapters(each, 0.1, torch.Generator().manual_seed(3))
    with torch.no_grad():
        given, expected = score(policy), score(plain)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(score(policy), given, atol=tolerance, rtol=0)
    found, wanted = gradients(policy), gradients(plain)
    assert found.keys() == wanted.keys()
    assert any(".layers.0." in name for name in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


def test_training_goes_on_bit_by_bit_and_its_adapter_is_anybody_s(
    make_recipe: Make, model_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Run steps of PPO with a reference, so that two adapters, or none, act on one 4-bit base; resume and export."""
    course = {"batch_size": 2, "learning_rate": 1e-3, "checkpoint_every": 2, "steps": 4}
    distance = {"kl": {"coefficient": 0.1}}
    recipe = make_recipe(lora=NF4, algorithm="ppo", loss=distance, **course)
    whole, last, again = train_twice(recipe, make_groups(8, 4), tokenizer, tmp_path, resume_at=2)
    assert all(line["kl"] > 0 for line in whole[1:])
    weights = "adapter_model.safetensors"
    assert (last / weights).read_bytes() == (again / weights).read_bytes()

    alone = AutoPeftModelForCausalLM.from_pretrained(last)
    assert alone.peft_config["default"].base_model_name_or_path == str(model_folder)
    export(last, tmp_path / "merged", adapter=False, push=None, say=print)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), last)
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, atol=1e-4, rtol=0)
        assert (merged(IDS).logits - AutoModelForCausalLM.from_pretrained(model_folder)(IDS).logits).abs().max() > 0.01
