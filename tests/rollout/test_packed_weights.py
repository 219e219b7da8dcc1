"""Large weights in oneDNN's layout: the same numbers, updates and digests as plain ones, and no second copy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.processes.devices import onednn_packs
from agentfactory.rollout.inference.embedded import packed_linear
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.rollout.inference.embedded.weight_updates import WeightUpdate, checksums
from tests.engine_runs import check, decode
from tests.placement.shapes import sizes

pytestmark = pytest.mark.skipif(not onednn_packs(torch.float32), reason="weights are packed on x86 CPUs")
# a head and gates of at least WHOLE elements; keys and values below it
CONFIG: dict[str, Any] = {
    **{**sizes(256, 1024, 2, 8, 1, 1024), "head_dim": 32, "tie_word_embeddings": False},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def network(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, **changes})).eval()


def sample(engine: Engine, rows: int) -> list[Request]:
    return decode(engine, [np.arange(1, 6 + index) * 7 % 1024 for index in range(rows)], 4, temperature=0.0)


def assert_exact(requests: list[Request], model: Qwen3ForCausalLM) -> None:
    for request in requests:
        check(model, request, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
def test_log_probabilities_are_the_models_own(rows: int) -> None:
    engine = Engine(network(), max_model_len=64, max_num_seqs=40)
    assert_exact(sample(engine, rows), network())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_weight_is_kept_once(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not onednn_packs(dtype):
        pytest.skip("bfloat16 is packed on CPUs with its instructions")
    model = network().to(dtype)
    sample(Engine(model, max_model_len=64, max_num_seqs=8), 8)
    plain = {name for name, weight in model.named_parameters() if weight.device.type == "cpu"}
    large = {name for name, weight in model.named_parameters() if weight.numel() >= packed_linear.WHOLE}
    assert plain & large == {"model.embed_tokens.weight"}
    assert len(large) == 2 + 3 * 2


@pytest.mark.parametrize("tied", [False, True])
def test_an_update_is_used_and_proven(tmp_path: Path, tied: bool) -> None:
    model, new = network(tie_word_embeddings=tied), network(1, tie_word_embeddings=tied)
    engine = Engine(model, max_model_len=64, max_num_seqs=8)
    sample(engine, 8)
    # bfloat16 files are converted
    save_file({name: value.bfloat16().clone() for name, value in new.state_dict().items()}, tmp_path / "w.safetensors")
    rounded = network(1, tie_word_embeddings=tied)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in new.state_dict().items()})
    update = WeightUpdate(model)
    update.load({"path": str(tmp_path / "w.safetensors")})
    update.check_whole()
    engine.reset_prefix_cache()
    assert_exact(sample(engine, 8), rounded)
    assert checksums(model) == checksums(rounded)


def test_sleep_keeps_weights_that_exist_once() -> None:
    model = network()
    engine = Engine(model, max_model_len=64, max_num_seqs=8)
    engine.sleep()
    engine.wake(weights=True, cache=True)
    assert_exact(sample(engine, 8), network())
