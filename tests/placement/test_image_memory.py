"""Planned memory of images beside the bytes that live while a real tower runs."""

from typing import Any

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from agentfactory.placement.activation_memory import LiveBytes
from agentfactory.placement.image_memory import patch_memory
from agentfactory.placement.server_memory import server_memory
from agentfactory.placement.trainer_memory import trainer_memory
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.features import compute_features
from agentfactory.rollout.inference.embedded.image_encoder import FEATURE_BYTES
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.network import apply_options
from tests.placement.shapes import sizes

ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEXT = {**sizes(64, 128, 1, 2, 1, 512), "bos_token_id": 0, "eos_token_id": 0}
TOWER = {"hidden_size": 128, "num_heads": 4, "depth": 8, "out_hidden_size": 64}


def network_of(kind: str) -> Any:
    if kind == "qwen2_5_vl":
        text = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}}
        tower = {**TOWER, "intermediate_size": 344, "fullatt_block_indexes": [3, 7], "patch_size": 14}
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower))
    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}, "head_dim": 32}
    tower = {**TOWER, "intermediate_size": 512, "patch_size": 16, "deepstack_visual_indexes": [2, 4]}
    tower["num_position_embeddings"] = 1024
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower))


def recipe_of(dtype: str, **train: Any) -> TrainRecipe:
    return TrainRecipe.model_validate({"model": {"path": "x", "dtype": dtype}, "train": {"steps": 1, **train}})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2_5_vl", "float32"),
        pytest.param("qwen2_5_vl", "bfloat16", marks=pytest.mark.long),
        pytest.param("qwen3_vl", "float32", marks=pytest.mark.long),
        ("qwen3_vl", "bfloat16"),
    ],
)
@pytest.mark.parametrize("train", [{}, {"vision": "trained"}, {"vision": "trained", "gradient_checkpointing": True}])
def test_a_towers_memory_is_planned(kind: str, dtype: str, train: dict[str, Any]) -> None:
    recipe, network = recipe_of(dtype, **train), network_of(kind)
    apply_options(network, recipe.train, "cpu", "padded")
    tower = network.base_model.visual
    trained = recipe.train.vision == "trained"
    values = tower.patch_embed.proj.weight[0].numel()
    low = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)
    with LiveBytes(0) as live:
        grids = torch.tensor([[1, 32, 32], [1, 32, 32]])
        inputs = {"pixel_values": torch.zeros(2048, values), "image_grid_thw": grids}
        with torch.set_grad_enabled(trained), low:
            features = compute_features(network, inputs, [256, 256])
        if trained:
            for weight in network.parameters():
                weight.grad = torch.zeros_like(weight)
            held = sum(weight.nbytes for weight in network.parameters())
            sum(part.sum() for image in features for part in (image.tokens, *image.deep)).backward()
    real = (live.peaks["start"].total - (held if trained else 0)) / 2048
    planned = patch_memory(tower, getattr(torch, dtype), trained, recipe.train.gradient_checkpointing)
    print(f"{real:.0f} bytes a patch, planned / real {planned / real:.2f}")
    assert 0.9 < planned / real < 1.4


def test_the_table_has_the_tower_and_its_images() -> None:
    network = network_of("qwen3_vl")
    blind = sum(weight.nbytes for name, weight in network.named_parameters() if ".visual." not in name)
    seeing = sum(weight.nbytes for weight in network.parameters())
    rows = trainer_memory(recipe_of("float32"), network.config, "cpu")
    assert rows["weights"] == pytest.approx(seeing, rel=0.01)
    # the frozen tower has neither
    assert rows["gradients"] == pytest.approx(blind, rel=0.01)
    trained = trainer_memory(recipe_of("float32", vision="trained"), network.config, "cpu")
    assert trained["gradients"] == pytest.approx(seeing, rel=0.01)
    assert trained["images"] > 3 * rows["images"] > 0


def test_a_server_has_the_tower_and_room_for_a_step_of_images() -> None:
    network = network_of("qwen3_vl")
    tower, length = network.base_model.visual, 64  # tokens of the largest image: 32 x 32 pixels each
    model = {"path": "x", "dtype": "bfloat16", "max_image_pixels": length * 32 * 32}

    def planned(**server: Any) -> dict[str, int]:
        recipe = RolloutRecipe.model_validate({"model": model, "server": server})
        return server_memory(recipe, network.config, "cpu").parts

    computed = 4 * patch_memory(tower, torch.bfloat16, trained=False, checkpointing=False)
    features = 3 * 64 * 2  # two levels of features beside the last, bfloat16
    assert planned(engine="vllm")["images"] == 2048 * (computed + features)
    few = planned(engine="vllm", options={"args": ["--max-num-batched-tokens", "16"]})
    assert few["images"] == length * (computed + features)
    embedded = planned(engine="embedded")
    assert embedded["images"] == length * computed + FEATURE_BYTES
    weights = sum({weight.data_ptr(): weight.numel() for weight in network.parameters()}.values())
    assert embedded["weights"] == 2 * weights
