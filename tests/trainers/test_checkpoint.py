"""Checkpoints are what transformers and peft load, and are never half there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trainers.checkpoint import save_checkpoint
from trainers.config import TrainRecipe
from trainers.policy import load_policy

Make = Callable[..., TrainRecipe]


def test_full_checkpoint_is_loaded_by_transformers(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = make_recipe().model.model_copy(update={"dtype": "bfloat16"})
    policy = load_policy(config, seed=0)
    path = save_checkpoint(tmp_path, 80, policy, policy.gather(), tokenizer, {"seed": 7, "groups": ["g1"]})
    assert path == tmp_path / "step-000080"
    assert [child.name for child in tmp_path.iterdir()] == ["step-000080"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == torch.bfloat16
    for name, value in policy.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template
    state = json.loads((path / "trainer_state.json").read_text())
    assert state == {"step": 80, "seed": 7, "groups": ["g1"]}
    again = load_policy(config.model_copy(update={"path": str(path)}), seed=0)
    for name, value in again.gather().items():
        assert torch.equal(value, policy.gather()[name]), name


def test_adapter_checkpoint_is_loaded_by_peft(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    policy = load_policy(make_recipe(lora={"rank": 2}).model, seed=3)
    path = save_checkpoint(tmp_path, 1, policy, policy.gather(), tokenizer, {})
    assert not (path / "model.safetensors").exists()
    loaded = AutoPeftModelForCausalLM.from_pretrained(path)
    assert loaded.peft_config["default"].base_model_name_or_path == str(model_folder)
    weights = dict(loaded.named_parameters())
    for name, value in policy.model.named_parameters():
        assert torch.equal(weights[name], value), name


def test_what_a_killed_run_left_is_replaced_and_what_is_whole_is_kept(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    policy = load_policy(make_recipe(lora={"rank": 2}).model, seed=0)
    partial = tmp_path / ".step-000001.partial"
    partial.mkdir()
    (partial / "rubbish").touch()
    path = save_checkpoint(tmp_path, 1, policy, policy.gather(), tokenizer, {})
    assert not (path / "rubbish").exists()
    assert not partial.exists()
    with pytest.raises(FileExistsError, match="never overwrites"):
        save_checkpoint(tmp_path, 1, policy, policy.gather(), tokenizer, {})
