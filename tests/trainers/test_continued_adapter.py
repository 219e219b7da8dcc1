"""Training that continues an adapter, also one that peft made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentfactory.base.errors import SettingError
from agentfactory.launching.merging import merge_adapter
from agentfactory.trainers.networks.critic import Role, make_actor_critic
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.teachers.teacher import make_reference
from tests.trainers.conftest import Make, make_groups, on_cpu
from tests.trainers.resumed import train_twice
from tests.trainers.scored import IDS, INPUTS, disturb, score, scores_of

pytestmark = pytest.mark.numbers

KL: dict[str, Any] = {"kl": {"coefficient": 0.1}}


@pytest.fixture
def trained(make_recipe: Make, tmp_path: Path) -> tuple[Path, Policy]:
    policy = load_policy(make_recipe(lora={"rank": 3}))
    disturb(policy, 3)
    policy.save_adapter(tmp_path / "adapter", dict(policy.gather().stream()))
    return tmp_path / "adapter", policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_begins_where_the_other_ended_and_so_does_its_reference(
    make_recipe: Make, trained: tuple[Path, Policy], dtype: Any
) -> None:
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


def test_an_adapter_of_another_network_is_refused_by_the_tensor_that_does_not_fit(
    make_recipe: Make, trained: tuple[Path, Policy]
) -> None:
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
