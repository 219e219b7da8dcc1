"""QLoRA on the CPU, which bitsandbytes supports, too: it must equal an adapter on the dequantised base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.commands.export_command import export
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.networks.policy import Policy, load_policy
from tests.trainers.conftest import Make, make_groups
from tests.trainers.resumed import train_twice
from tests.trainers.scored import IDS, score

pytestmark = pytest.mark.numbers


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
    assert recipe.model.lora is not None
    load_network(recipe).dequantize().save_pretrained(folder)
    lora = recipe.model.lora.model_copy(update={"quantization": None})
    model = recipe.model.model_copy(update={"path": str(folder), "lora": lora})
    return recipe.model_copy(update={"model": model})


def with_an_adapter_that_acts(policy: Policy) -> Policy:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return policy


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
    policy = with_an_adapter_that_acts(load_policy(recipe))
    plain = with_an_adapter_that_acts(load_policy(dequantised(recipe, tmp_path / "dequantised")))
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
