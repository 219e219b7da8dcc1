"""Weights under fsdp2: only rank 0 loads them, and two ranks give the results of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from tests.placement.shapes import sizes
from tests.trainers.conftest import on_cpu
from tests.trainers.launched_loading import load, loss_and_gradients
from tests.trainers.ranks import on_ranks
from tests.untrained_tokens import make_needs, make_untrained, recipe_of

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]


def save_network(folder: Path, layers: int, width: int) -> float:
    """Save a network with tied embeddings in float32; return its size in MB."""
    torch.manual_seed(0)
    shape = sizes(width, 4 * width, layers, width // 64, width // 64, 32 * width)
    network = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=64, tie_word_embeddings=True))
    network.save_pretrained(folder)
    return sum(4e-6 * weight.numel() for weight in network.parameters())


def recipe(folder: Path, strategy: str, dtype: str = "float32") -> TrainRecipe:
    settings = {"steps": 1, "strategy": strategy, "processes": 1 if strategy == "single" else 2}
    return TrainRecipe.model_validate({"model": {"path": str(folder), "dtype": dtype}, "train": settings})


def two_ranks(folder: Path, recipes: list[TrainRecipe]) -> list[list[dict[str, Any]]]:
    return on_ranks(load, recipes, folder, "fsdp2")


# 134 MB, and 1 GiB
@pytest.mark.parametrize(("layers", "width"), [(6, 512), pytest.param(14, 1024, marks=pytest.mark.long)])
def test_a_rank_never_holds_the_weights_that_others_keep(tmp_path: Path, layers: int, width: int) -> None:
    size = save_network(tmp_path / "model", layers, width)
    found = two_ranks(tmp_path, [recipe(tmp_path / "model", "fsdp2")])
    first, second = (rank[0] for rank in found)
    print(f"{size:.0f} MB of weights; peaks: {first['peak']:.0f} and {second['peak']:.0f} MB")
    # its half, plus one weight at a time; the largest is the embedding
    assert 0.5 * size < second["peak"] < 0.9 * size + 40
    # rank 0 reads the file and keeps the whole network until the other rank has its shard
    assert first["peak"] < 2.1 * size + 40
    expected = loss_and_gradients(Learner(recipe(tmp_path / "model", "single"), on_cpu()))
    _assert_same(first, expected)
    _assert_same(second, expected)


def test_what_depends_on_weights_is_decided_by_rank_0(tmp_path: Path, model_folder: Path) -> None:
    """Tying of embeddings, usability of the head, and the values of buffers."""
    differing = tmp_path / "differing"
    Qwen3ForCausalLM.from_pretrained(model_folder).save_pretrained(differing)
    weights = load_file(differing / "model.safetensors")
    # the configuration ties them, but the checkpoint has two different ones
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).clone()
    save_file(weights, differing / "model.safetensors", metadata={"format": "pt"})
    scaled = GraniteConfig(**sizes(16, 16, 1, 2, 2, 32), logits_scaling=4.0, initializer_range=0.5)
    GraniteForCausalLM(scaled).save_pretrained(tmp_path / "scaled")
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    routed = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes(32, 32, 2, 2, 2, 64), **experts, initializer_range=0.3))
    for name, buffer in routed.named_buffers():
        if "e_score_correction_bias" in name:
            # part of the checkpoint; it decides which experts are used
            buffer.copy_(torch.linspace(3.0, -3.0, 4))
    routed.save_pretrained(tmp_path / "routed")
    folders = [differing, tmp_path / "scaled", model_folder, tmp_path / "routed"]
    # an adapter with rows of tokens that were never trained, of which the tied tables share one
    needs = make_needs()
    untrained = make_untrained("tied", tmp_path / "untrained", needs)
    sharded = [recipe(folder, "fsdp2") for folder in folders]
    alone = [recipe(folder, "single") for folder in folders]
    sharded.append(recipe_of(untrained, strategy="fsdp2", processes=2))
    alone.append(recipe_of(untrained))
    found = two_ranks(tmp_path, sharded)
    for rank in found:
        assert "GraniteForCausalLM changes its logits" in rank[1]["refused"]
        for number in (0, 2, 3, 4):
            single = Learner(alone[number], on_cpu(), needs=needs if number == 4 else None)
            _assert_same(rank[number], loss_and_gradients(single))
    rows = [gradient for name, gradient in found[0][4]["gradients"].items() if "token_adapter" in name]
    assert rows
    assert all(gradient.abs().max() > 1e-3 for gradient in rows)
    assert "model.lm_head.weight" in found[0][0]["gradients"]
    assert "model.lm_head.weight" not in found[0][2]["gradients"]


def test_bfloat16_is_as_exact_as_autocast(tmp_path: Path) -> None:
    """Weights are gathered and the residual stream is kept in bfloat16; autocast keeps both in float32."""
    layers = 12
    save_network(tmp_path / "model", layers, 128)
    first, second = (found[0] for found in two_ranks(tmp_path, [recipe(tmp_path / "model", "fsdp2", "bfloat16")]))
    found = {"fsdp2": first}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = loss_and_gradients(Learner(recipe(tmp_path / "model", "single", dtype), on_cpu()))
    assert first["used"] == second["used"] == {torch.bfloat16}
    assert found["bfloat16"]["used"] == {torch.float32}
    # shards of weights and gradients are in float32
    assert {gradient.dtype for gradient in first["gradients"].values()} == {torch.float32}
    autocast, sharded = (_errors(found[name], found["float32"]) for name in ("bfloat16", "fsdp2"))
    print(f"errors of loss and gradient: autocast {autocast}, fsdp2 {sharded}")
    # about ten results per layer and direction, each rounded to 8 bits: by 2**-9 at most, and evenly distributed
    rounding = 2**-9 * (20 * layers / 3) ** 0.5
    for error, by_autocast in zip(sharded, autocast, strict=True):
        assert error < rounding
        assert error < 2 * by_autocast + 2**-9
    torch.testing.assert_close(second["gradients"], first["gradients"], atol=0, rtol=0)


def _errors(given: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    def flat(found: dict[str, Any]) -> Tensor:
        return torch.cat([found["gradients"][name].flatten() for name in sorted(expected["gradients"])])

    loss = abs(float(given["loss"] - expected["loss"])) / abs(float(expected["loss"]))
    return loss, float((flat(given) - flat(expected)).norm() / flat(expected).norm())


def _assert_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert given["loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert given["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        # an adapter's first matrices have a gradient of 0 at first
        error = (given["gradients"][name] - gradient).norm()
        assert error <= 1e-5 * gradient.norm(), (name, float(error))
