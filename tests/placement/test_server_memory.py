"""The planned memory of a server against a real engine's, and against figures that others have published."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentfactory.placement.machine import CUDA_GRAPHS, LIBRARIES
from agentfactory.placement.server_memory import ServerMemory, server_memory
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.packed_linear import WHOLE, onednn_modules
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.rollout.inference.embedded.step_plan import Planner
from tests.placement.allocations import allocations
from tests.placement.shapes import SEVEN, sizes

SMALL = {**sizes(128, 256, 3, 4, 2, 8000), "head_dim": 32}
LATENT = {
    **{"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
}
"""Of DeepSeek V3's attention and experts."""


DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.extended)]


def plan(
    config: PreTrainedConfig, device: str = "cuda", lora: Any = None, served: Any = None, **server: Any
) -> ServerMemory:
    sections = {
        "model": {"path": "x", "lora": lora, "dtype": server.pop("dtype", "bfloat16")},
        "rollout": {"group_size": 8, "max_total_tokens": 4096},
        "server": server,
    }
    return server_memory(RolloutRecipe.model_validate(sections), config, device, served)


# the second time, the head has its copy, too, which it gets when all 32 sequences sample together
SHORT = [[np.arange(number, number + 200) for number in range(first, first + 32)] for first in (0, 1000)]
# two of three sequences go on: that between them is idle, and the fewer tokens are padded to the more
LONG = [[np.arange(first, first + 3950) for first in (0, 2000, 4000)]]
LONG += [[np.append(LONG[0][0], np.arange(1, 129)), np.append(LONG[0][2], np.arange(1, 129))]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "sequences", "prompts"), [(250, 32, SHORT), pytest.param(4096, 4, LONG, marks=pytest.mark.long)]
)
def test_the_engine_takes_the_plan(length: int, sequences: int, prompts: list[list[np.ndarray]], dtype: str) -> None:
    check_planned(Qwen3Config(**SMALL), length, sequences, prompts, dtype)


def check_planned(
    config: PreTrainedConfig, length: int, sequences: int, prompts: list[list[np.ndarray]], dtype: str
) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    sizes = {"max_model_len": length, "max_num_seqs": sequences}
    planned = plan(config, "cpu", engine="embedded", dtype=dtype, **sizes)
    # the profile sees that weights are replaced, but not the end of those that were allocated before it
    is_large = any(module.weight.numel() >= WHOLE for module in onednn_modules(model))
    replaced = planned.parts["weights"] if is_large else 0
    with allocations() as allocated:
        engine = Engine(model, **sizes)
        for together in prompts:
            for prompt in together:
                # 40 tokens: prompts are computed in parts, and at last all sample together. One token: what a slot has
                # computed is then the prompt alone, and is gone on from in place
                tokens = 40 if prompts is SHORT else 1
                engine.add(Request(prompt, max_tokens=tokens, on_finish=lambda request: None))
            while engine.busy:
                engine.step()
    assert planned.least_cache == engine.cache.nbytes
    assert planned.parts["weights"] == sum(weight.nbytes for weight in model.parameters())
    rest = planned.parts.get("packed", 0) + planned.parts["workspace"]
    real = allocated.peak - engine.cache.nbytes - replaced
    assert real <= rest < 1.45 * real


@pytest.mark.parametrize(
    ("slots", "count"),
    [
        ([0, 3], [510, 510]),
        (range(0, 128, 2), [32] + [2] * 62 + [32]),
        (range(128), [32] + [2] * 127),
        (range(256), [32] + [3] * 255),
        (range(0, 14, 2), [129] * 6 + [250]),
    ],
)
def test_masks_are_at_most_twice_the_real_queries(slots: Sequence[int], count: list[int]) -> None:
    """Padding and idle slots together at most double them, as the plan of the memory counts them."""
    counts, length = np.array(count), 512
    position = np.concatenate([np.arange(length - n, length) for n in counts])
    planner = Planner(heads=2, kv_heads=1, length=length, dtype=torch.float32, device=torch.device("cpu"))
    groups = planner.plan(np.array(slots), length - counts, counts, position).groups
    assert sum(group.mask.numel() for group in groups) <= 2 * planner.heads * counts.sum() * length


def test_weights_and_cache_of_a_known_model() -> None:
    planned = plan(Qwen2Config(**SEVEN))
    assert planned.parts["weights"] == 2 * 7_615_616_512
    # 28 layers, keys and values, 4 heads of 128, 2 bytes
    assert planned.cache_per_token == 28 * 2 * 4 * 128 * 2
    assert planned.cache_per_sequence == 0
    # the group's chains, or a sequence of max_model_len if that is more; and the block that vLLM never uses
    assert planned.least_cache == (8 * 4096 + 16) * planned.cache_per_token
    assert plan(Qwen2Config(**SEVEN), max_model_len=65536).least_cache == (65536 + 16) * planned.cache_per_token
    shared = plan(Qwen2Config(**SEVEN), options={"tensor_parallel_size": 8})
    assert shared.parts["weights"] == planned.parts["weights"] // 8
    # 4 heads for 8 devices: each has one
    assert shared.cache_per_token == planned.cache_per_token // 4
    halved = plan(Qwen2Config(**SEVEN), options={"args": ["--kv-cache-dtype", "fp8"]})
    assert halved.cache_per_token * 2 == planned.cache_per_token


@pytest.mark.slow
def test_quantised_weights() -> None:
    tables = 2 * 2 * 152064 * 3584
    plain, eight = plan(Qwen2Config(**SEVEN)), plan(Qwen2Config(**SEVEN), quantization="fp8")
    assert eight.parts["weights"] - tables == pytest.approx((plain.parts["weights"] - tables) / 2, rel=1e-3)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    copy = Qwen2Config(**SEVEN, quantization_config=settings)
    planned = plan(Qwen2Config(**SEVEN), lora={"rank": 16}, served=copy, model="x-AWQ")
    # the files of Qwen/Qwen2.5-7B-Instruct-AWQ have 5.57 GB
    assert planned.parts["weights"] == pytest.approx(5.57e9, rel=0.005)
    unknown = plan(Qwen2Config(**SEVEN), quantization="torchao")
    assert unknown.parts["weights"] == plain.parts["weights"]


def test_adapters_take_the_places_that_vllm_makes() -> None:
    assert "adapters" not in plan(Qwen3Config(**SMALL)).parts
    linear = 3 * sum(map(sum, [(128, 128), (128, 64), (128, 64), (128, 128), (128, 256), (128, 256), (256, 128)]))
    tables = 2 * (8000 + 128)
    vllm = plan(Qwen3Config(**SMALL), lora={"rank": 12})
    # a rank of 12 gets a place of 16
    assert vllm.parts["adapters"] == 4 * 16 * (linear + tables) * 2
    moe = Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[])
    # gate, up and down of each expert in place of the layer's; small slots of routers are left out
    experts = 3 * (4 * 3 * (128 + 32) - 3 * (128 + 256))
    assert plan(moe, lora={"rank": 12}).parts["adapters"] == 4 * 16 * (linear + experts + tables) * 2
    embedded = plan(Qwen3Config(**SMALL), lora={"rank": 12}, engine="embedded")
    assert embedded.parts["adapters"] == 4 * 12 * (linear + 8000 + 128) * 2


def test_hybrids_have_states_per_sequence() -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    linear |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4}
    hybrid = Qwen3_5TextConfig(**SMALL | linear, layer_types=["linear_attention"] * 3 + ["full_attention"])
    planned = plan(hybrid)
    assert planned.cache_per_token == 2 * 2 * 32 * 2
    # transformers' own cache says what the states are
    model = AutoModelForCausalLM.from_config(hybrid, dtype=torch.float32)
    layers = model(torch.zeros(1, 7, dtype=torch.int64)).past_key_values.layers[:3]
    states = [(layer.conv_states[0].numel(), layer.recurrent_states[0].numel()) for layer in layers]
    # its convolution keeps one input more than vLLM's
    assert planned.cache_per_sequence == sum(conv * 3 // 4 * 2 + recurrent * 4 for conv, recurrent in states)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    planned = plan(Qwen3Config(**SMALL, layer_types=kinds, use_sliding_window=True, sliding_window=100))
    assert (planned.cache_per_token, planned.cache_per_sequence) == (2 * 2 * 32 * 2, 2 * 100 * 2 * 2 * 32 * 2)


def test_the_embedded_engine_keeps_all_tokens_of_all_layers() -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 100}
    sizes = {**SMALL, "num_hidden_layers": 4}
    plain = plan(Qwen3Config(**sizes), "cpu", engine="embedded", max_num_seqs=4, max_model_len=1024)
    for config in (
        Qwen3Config(**sizes, use_sliding_window=True, **windows),
        GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, **windows),
        DeepseekV3Config(**{**sizes, "num_key_value_heads": 4, "head_dim": 16}, **LATENT),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        engine = Engine(model, max_model_len=1024, max_num_seqs=4)
        planned = plan(config, "cpu", engine="embedded", max_num_seqs=4, max_model_len=1024)
        assert planned.least_cache == engine.cache.nbytes
        assert (planned.parts["workspace"] > plain.parts["workspace"]) == ("sliding_attention" in str(config.to_dict()))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_and_sinks_take_what_is_planned(dtype: str) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 100}
    check_planned(GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, **windows), 4096, 4, LONG, dtype)


def test_what_vllm_is_told_changes_its_workspace() -> None:
    config = Qwen2Config(**SEVEN)
    usual = plan(config).parts["workspace"]
    assert plan(config).parts["graphs"] * 2 == plan(config, lora={"rank": 8}).parts["graphs"] == 2 * CUDA_GRAPHS
    assert "graphs" not in plan(config, options={"args": ["--enforce-eager"]}).parts
    more = plan(config, options={"args": ["--max-num-batched-tokens=8192"]}).parts["workspace"]
    recipe = RolloutRecipe.model_validate({"model": {"path": "x"}})
    large = server_memory(recipe, config, "cuda", device_memory=80 * 2**30).parts["workspace"]
    assert usual < more == large
    # a sequence more: its logits
    assert plan(config, max_num_seqs=129).parts["workspace"] - usual > 152064 * 4
    assert "context" in plan(config).parts
    assert plan(config, "cpu").parts["context"] == LIBRARIES
