"""The decode loop alone: what it refuses, and the paths that short requests over HTTP do not take."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollout.embedded.engine import PREFILL_TOKENS, Engine, Request, UnsupportedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **changes}))


def run(engine: Engine, prompts: list[np.ndarray], max_tokens: int = 6) -> list[Request]:
    requests = [Request(prompt, max_tokens, lambda request: None) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return requests


def check(engine: Engine, model: torch.nn.Module, request: Request) -> None:
    ids = torch.tensor([[*request.prompt.tolist(), *request.tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


def random_prompts(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, 97, length) for length in lengths]


def test_long_prompts_come_in_chunks_beside_short_ones() -> None:
    engine = Engine(qwen3(), max_model_len=2 * PREFILL_TOKENS + 500, max_num_seqs=40)
    for request in run(engine, random_prompts(*range(1, 70), 700, PREFILL_TOKENS, 2 * PREFILL_TOKENS + 99)):
        check(engine, qwen3().eval(), request)


def test_sparse_slots_are_copied_out() -> None:
    engine = Engine(qwen3(), max_model_len=256, max_num_seqs=32)
    first = run(engine, random_prompts(*range(40, 72)))
    # two conversations go on in slots that lie far apart
    later = run(engine, [np.array([*first[i].prompt, *first[i].tokens, 5, 6]) for i in (0, 31)])
    assert abs(later[0].slot - later[1].slot) > 10
    for request in later:
        check(engine, qwen3().eval(), request)


def test_large_batches_of_wide_layers() -> None:
    """Wide enough for the oneDNN path."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "initializer_range": 0.05}
    engine = Engine(qwen3(**shape), max_model_len=512, max_num_seqs=40)
    for request in run(engine, random_prompts(*range(1, 80))):
        check(engine, qwen3(**shape).eval(), request)


def test_models_that_it_cannot_decode_are_refused() -> None:
    sizes = {"max_model_len": 64, "max_num_seqs": 2}
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        Engine(qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1), **sizes)
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        Engine(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)), **sizes)
    with pytest.raises(MemoryError, match="lower max_num_seqs"):
        Engine(qwen3(), max_model_len=2**16, max_num_seqs=2**12)


def test_other_positions_than_rotary_work_too() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256)).eval()
    engine = Engine(model, max_model_len=256, max_num_seqs=8)
    requests = run(engine, random_prompts(3, 40, 41, 90))
    model.set_attn_implementation("sdpa")
    for request in requests:
        check(engine, model, request)
