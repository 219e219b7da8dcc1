"""The planned memory of a trainer against what torch's allocator hands out while the real learner updates."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from agentfactory.placement.activation_memory import _trace, fullest, trace
from agentfactory.placement.machine import NCCL_BUFFERS
from agentfactory.placement.meta_model import meta_model
from agentfactory.placement.trainer_memory import optimizer_state, trainer_memory
from agentfactory.trainers.batches.batch import Batch
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.update.learner import Learner, Terms
from agentfactory.trainers.update.optimizer import make_optimizer
from tests.placement.allocations import allocations
from tests.placement.shapes import SEVEN, sizes

pytestmark = [pytest.mark.slow, pytest.mark.extended]

MIB = 2**20
SHAPES: dict[str, PreTrainedConfig] = {
    # a large head that is tied, fewer keys than queries
    "qwen3": Qwen3Config(**sizes(128, 384, 4, 4, 2, 16384), head_dim=32, tie_word_embeddings=True),
    # deep, with biases
    "qwen2": Qwen2Config(**sizes(192, 640, 6, 6, 2, 2048)),
    # wide, as many keys as queries
    "llama": LlamaConfig(**sizes(320, 896, 3, 5, 5, 4096)),
}
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao (extra fp8)")
LORA = {"rank": 16}
NF4 = {"rank": 16, "quantization": "nf4"}


def make_recipe(path: Path | str = "x", dtype: str = "float32", lora: Any = None, **train: Any) -> TrainRecipe:
    length, teacher = train.pop("length", 129), train.pop("teacher", None)
    sections = {
        "teacher": None if teacher is None else {"model": str(path), "divergence": teacher},
        "model": {"path": str(path), "dtype": dtype, "lora": lora},
        "rollout": {"max_total_tokens": length, "group_size": 4},
        "train": {"steps": 1, "batch_size": 1, "token_budget": 512, **train},
    }
    return TrainRecipe.model_validate(sections)


long = pytest.mark.long


@pytest.mark.parametrize(
    ("shape", "lora", "batching", "dtype", "train"),
    [
        pytest.param("qwen3", None, "packed", "float32", {}, marks=long),
        ("qwen3", None, "tree", "bfloat16", {}),
        ("qwen3", LORA, "packed", "bfloat16", {}),
        ("qwen3", LORA, "tree", "float32", {}),
        pytest.param("qwen2", None, "packed", "bfloat16", {"optimizer": {"name": "adafactor"}}, marks=long),
        pytest.param("qwen2", None, "tree", "float32", {"gradient_checkpointing": True}, marks=long),
        pytest.param("qwen2", LORA, "packed", "float32", {"gradient_checkpointing": True}, marks=long),
        pytest.param("qwen2", LORA, "tree", "bfloat16", {}, marks=long),
        pytest.param("llama", None, "packed", "float32", {"loss": {"kl": {"coefficient": 0.1}}}, marks=long),
        pytest.param("llama", None, "tree", "bfloat16", {"algorithm": "ppo"}, marks=long),
        ("llama", NF4, "packed", "bfloat16", {}),
        pytest.param("llama", LORA, "tree", "float32", {"algorithm": "ppo"}, marks=long),
        pytest.param("qwen3", None, "tree", "bfloat16", {"teacher": "jensen_shannon"}, marks=pytest.mark.extended),
        pytest.param("llama", LORA, "packed", "float32", {"teacher": "reverse_kl"}, marks=long),
        pytest.param("qwen2", None, "packed", "bfloat16", {"precision": "fp8"}, marks=needs_torchao),
        pytest.param("llama", LORA, "tree", "bfloat16", {"precision": "fp8"}, marks=[needs_torchao, pytest.mark.long]),
    ],
)
def test_planned_is_what_updates_allocate(
    shape: str, lora: Any, batching: str, dtype: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SHAPES[shape]
    # a few chunks, as with real vocabularies
    monkeypatch.setattr("agentfactory.trainers.networks.policy.LOGITS_PER_CHUNK", 2**22)
    # stored in another dtype than they are loaded in: else weights stay in the file's pages, which nobody allocates;
    # and loaded by this thread, which is the one that is watched
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    stored = torch.float32 if lora and dtype == "bfloat16" else torch.bfloat16
    AutoModelForCausalLM.from_config(config, dtype=stored).save_pretrained(tmp_path)
    recipe = make_recipe(tmp_path, dtype, lora, batching=batching, **train)
    planned = trainer_memory(recipe, config, "cpu", config)
    del planned["context"]  # the libraries
    with allocations() as allocated:
        learner = Learner(recipe, Accelerator(cpu=True))
        part = fullest(recipe, learner.batching)
        # from the second update on the optimiser's state is there too
        for parts in ([part], [part, part]):
            learner.update(
                Batch(parts, 1.0, 1),
                lambda index, part, logprob, entropy, *divergence: Terms(loss=(sum(divergence) + logprob).sum()),
                (lambda part, values: Terms(loss=values.sum())) if learner.has_critic else None,
            )
    real = allocated.peak
    print(f"{real / MIB:.0f} MiB, planned / real {sum(planned.values()) / real:.3f}")
    assert real > 20 * MIB
    assert sum(planned.values()) == pytest.approx(real, rel=0.1), planned


HYBRID = Qwen3_5TextConfig(
    **sizes(64, 128, 6, 4, 2, 512),
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
)


@pytest.mark.parametrize(
    "config", [pytest.param(SHAPES["qwen2"], id="one kind", marks=long), pytest.param(HYBRID, id="two kinds")]
)
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=long), True])
def test_all_layers_take_what_a_few_say(config: PreTrainedConfig, checkpointing: bool) -> None:
    recipe = make_recipe(lora=LORA, dtype="bfloat16", gradient_checkpointing=checkpointing, length=65)
    whole = max(_trace(recipe, config, "cpu").values(), key=lambda peak: peak.total)
    peak, _ = trace(recipe, config, "cpu")
    # all but the first layer have a gradient to hand down: one layer more than there are, at most
    assert whole.total <= peak.total <= whole.total * (1 + 1 / config.num_hidden_layers)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd", "adamw_8bit", "lion"])
def test_state_of_an_optimiser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # bitsandbytes' optimisers run on a CPU too; the recipe keeps them for GPUs
    monkeypatch.setattr("agentfactory.trainers.update.optimizer.need_gpu", lambda *_: None)
    train = make_recipe(optimizer={"name": name}).train
    model = AutoModelForCausalLM.from_config(SHAPES["llama"], dtype=torch.float32)
    optimizer = make_optimizer(model, train)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [entry.items() for entry in optimizer.state.values()]
    # qmaps are shared by all weights
    tensors = [value for state in states for key, value in state if isinstance(value, Tensor) and "qmap" not in key]
    real = sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.ndim)
    assert real == optimizer_state(model, train)


def test_four_bit_weights(tmp_path: Path) -> None:
    config = SHAPES["llama"]
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    recipe = make_recipe(tmp_path, "bfloat16", NF4)
    network = load_network(recipe)
    real = sum(weight.numel() * weight.itemsize for weight in (*network.parameters(), *network.buffers()))
    for module in network.modules():
        if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
            real += state.absmax.numel() + state.state2.absmax.numel() * 4
    assert trainer_memory(recipe, config, "cpu")["weights"] == real
    # arXiv:2305.14314 has 0.127 bits a weight for the constants
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    matrices = sum(weight.numel() for weight in meta_model(make_recipe(), config).parameters()) - tables // 2
    assert (real - tables) * 8 / matrices == pytest.approx(4.127, abs=0.01)


def test_a_large_model_on_a_gpu() -> None:
    config, count = Qwen2Config(**SEVEN), 7_615_616_512
    rows = trainer_memory(make_recipe(dtype="bfloat16", batching="packed"), config, "cuda")
    assert rows["weights"] - 4 * count < MIB
    assert rows["gradients"] == 4 * count
    assert rows["optimizer"] == 8 * count
    # autocast keeps every matrix of the layers, and the head, in bfloat16
    assert rows["activations"] > 2 * (count - 152064 * 3584)
    assert rows["context"] > 0
    several, shares = (
        trainer_memory(make_recipe(dtype="bfloat16", batching="packed", strategy=kind, processes=8), config, "cuda")
        for kind in ("ddp", "fsdp2")
    )
    # shards of a machine's share, whatever the number of machines; without GPUs here, machines of 8 are planned for
    hybrid = make_recipe(dtype="bfloat16", batching="packed", strategy="hsdp", processes=24)
    for gpus, count in ((8, 8), (0, 8), (4, 4), (5, 4), (24, 12)):
        found = trainer_memory(hybrid, config, "cuda", gpus=gpus)
        assert found["gradients"] == pytest.approx(rows["gradients"] / count, abs=8)
        if count == 8:
            # two more communicators
            context = shares["context"] + 2 * NCCL_BUFFERS
            assert {**found, "batch": 0} == {**shares, "batch": 0, "context": context}
    assert several["buckets"] == several["gradients"] == rows["gradients"]
    for row in ("weights", "gradients", "optimizer"):
        assert shares[row] == pytest.approx(rows[row] / 8, abs=8)
    # embeddings and head, with their gradients, are whole in bfloat16; of the layers a few are
    tables = 2 * 152064 * 3584 * 2
    assert 2 * tables < shares["gathered"] < 2 * tables + rows["weights"] / 8
    # and there are no copies of the layers' weights; norms copy the residual stream, which is now in bfloat16
    assert shares["activations"] < rows["activations"] - 0.9 * 2 * (count - 2 * 152064 * 3584)


def test_what_is_offloaded_is_not_on_the_device() -> None:
    options = {"dtype": "bfloat16", "lora": LORA, "batching": "packed"}
    kept, offloaded = (
        trainer_memory(make_recipe(**options, gradient_checkpointing=way), Qwen2Config(**SEVEN), "cuda")["activations"]
        for way in (True, "offload")
    )
    # a layer's input for each layer, less the one that is computed
    assert kept - offloaded == pytest.approx(27 * 512 * 3584 * 2, rel=0.1)


def test_kernels_that_only_a_gpu_has_can_be_planned_anywhere() -> None:
    options = {"liger": True, "compile": True, "attention": "flex_attention", "batching": "tree"}
    assert trainer_memory(make_recipe(**options), SHAPES["llama"], "cuda")["activations"]
    with pytest.raises(ValueError, match=r"train.batching: packed would be wrong.*linear_attention"):
        trainer_memory(make_recipe(batching="packed"), HYBRID, "cuda")
