"""A quantised copy is the same model; what has other shapes or computes otherwise is told apart."""

from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from agentfactory.placement.meta_model import difference
from tests.placement.shapes import SEVEN, sizes

QWEN = {**SEVEN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def qwen(**changes: Any) -> PretrainedConfig:
    return Qwen2Config(**{**QWEN, **changes})


@pytest.mark.parametrize(
    "changes", [{"quantization_config": AWQ, "dtype": "float16", "use_cache": False}, {"tie_word_embeddings": True}]
)
def test_a_copy_in_another_precision_is_the_same_model(changes: dict[str, Any]) -> None:
    assert difference(qwen(), qwen(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 151936}, "vocab_size is 151936, not 152064"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, "rope_parameters is .*10000000.0}, not"),
        (
            {"intermediate_size": 18944 + 128},
            r"its weights have layers.0.mlp.gate_proj.weight of shape \[19072, 3584\] where "
            r"layers.0.mlp.gate_proj.weight of shape \[18944, 3584\] is expected",
        ),
    ],
)
def test_another_shape_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert difference(qwen(), qwen(**changes)) is None, difference(qwen(), qwen(**changes))


def test_another_architecture_is_told() -> None:
    llama = LlamaConfig(**SEVEN, tie_word_embeddings=False)
    assert difference(qwen(), llama) == "model_type is llama, not qwen2"
    wide, narrow = (Qwen3Config(**sizes(64, 64, 1, 4, 4, 64), head_dim=dim) for dim in (32, 16))
    assert "q_proj.weight of shape [64, 64] where" in str(difference(wide, narrow))
