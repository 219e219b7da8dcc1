"""The decode loop alone: what it refuses, and the paths that short requests over HTTP do not take."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentfactory.rollout.embedded.engine import PREFILL_TOKENS, Engine
from agentfactory.rollout.embedded.eviction import Evictable
from agentfactory.rollout.embedded.lora import Adapter
from agentfactory.rollout.embedded.request import Request, UnsupportedModel

pytestmark = pytest.mark.numbers

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


def run(
    engine: Engine, prompts: list[np.ndarray], max_tokens: int = 6, adapters: tuple[Adapter | None, ...] = (None,)
) -> list[Request]:
    """The requests have the adapters in turns, and draw by seeds of their own."""
    requests = [Request(prompt, max_tokens, lambda request: None) for prompt in prompts]
    for index, request in enumerate(requests):
        request.generator, request.adapter = random.Random(index), adapters[index % len(adapters)]
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
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=3e-4, rtol=0)


def random_prompts(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, 97, length) for length in lengths]


@pytest.mark.slow
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


@pytest.mark.slow
def test_large_batches_of_wide_layers() -> None:
    """Wide enough for the oneDNN path."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "initializer_range": 0.05}
    engine = Engine(qwen3(**shape), max_model_len=512, max_num_seqs=40)
    for request in run(engine, random_prompts(*range(1, 80))):
        check(engine, qwen3(**shape).eval(), request)


def test_what_is_not_a_number_spoils_no_later_sequence() -> None:
    model = qwen3()
    engine = Engine(model, max_model_len=64, max_num_seqs=2)
    prompts = [np.arange(1, 40), np.arange(50, 90)]
    healthy = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    assert [request.finish_reason for request in run(engine, prompts)] == ["error", "error"]
    model.load_state_dict(healthy)
    for request in run(engine, [prompt[:5] for prompt in prompts]):
        assert request.finish_reason == "length"
        check(engine, qwen3(), request)


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


def make_adapter(model: Qwen3ForCausalLM, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(folder)
    return folder


def test_static_steps_equal_dynamic_ones(tmp_path: Path) -> None:
    """Base and two adapters in one batch, alone, in the first slots, and in slots that lie far apart."""
    sizes = {"max_model_len": 600, "max_num_seqs": 40}
    engines = Engine(qwen3(), **sizes), Engine(qwen3(), **sizes, static_decode=True)
    paths = [make_adapter(qwen3(), tmp_path / name, seed) for seed, name in enumerate("ab")]
    seen: list[list[Request]] = []
    for engine in engines:
        one, two = (engine.adapters.load(path.name, str(path)) for path in paths)
        done = run(engine, random_prompts(*range(40, 75)), 9, (None, one, two))
        # they go on at the ends of the cache
        ends = [np.array([*done[i].prompt, *done[i].tokens, 5, 6]) for i in (0, 34)]
        done += run(engine, ends, 6, (one,)) + run(engine, ends[:1], 6, (None, one))
        done += run(engine, random_prompts(1, 500), 30)
        seen.append(done)
    for dynamic, static in zip(*seen, strict=True):
        assert static.tokens == dynamic.tokens
        np.testing.assert_allclose(static.logprobs, dynamic.logprobs, atol=1e-4)
    assert engines[0].static is None
    shapes = engines[1].static.shapes
    assert {shape.viewed for shape in shapes} == {shape.mixed for shape in shapes} == {True, False}
    assert {len(shape.adapters) for shape in shapes} == {0, 1, 2}
    assert {shape.keys for shape in shapes} == {256, 512, 608}
    # few shapes are all that a GPU has to capture
    assert len(shapes) < 15


def test_static_steps_leave_other_slots_as_they_are() -> None:
    engine = Engine(qwen3(), max_model_len=256, max_num_seqs=8, static_decode=True)
    first = run(engine, random_prompts(60, 61, 62))
    run(engine, random_prompts(90, 91))
    # the rows of slots that nobody held were computed too
    for request, lines in zip(first, (60, 61, 62), strict=True):
        again = run(engine, [np.array([*request.prompt, *request.tokens, 7])])[0]
        assert again.slot == request.slot
        assert len(request.prompt) == lines
        check(engine, qwen3().eval(), again)


def test_static_steps_read_nothing_on_the_host(tmp_path: Path) -> None:
    engine = Engine(qwen3(), max_model_len=600, max_num_seqs=8, static_decode=True)
    adapter = engine.adapters.load("a", str(make_adapter(qwen3(), tmp_path, 0)))
    run(engine, random_prompts(5, 6), 4, (None, adapter))
    step, _ = engine.static._steps[engine.static.shapes[-1]]
    # fake tensors have shapes and no values: what needs a value raises, as it would end a capture
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        logits = step.run()
        assert logits.shape == (8, 97)
        with pytest.raises(DynamicOutputShapeException):
            logits[logits > 0]
        with pytest.raises(DataDependentOutputException):
            logits.max().item()


def test_an_adapter_takes_the_place_of_one_that_has_gone(tmp_path: Path) -> None:
    """Captured steps go on reading there."""
    engine = Engine(qwen3(), max_model_len=128, max_num_seqs=8, static_decode=True)
    prompts = random_prompts(30)
    outcomes, shapes = [], []
    for seed in (0, 1):
        path = str(make_adapter(qwen3(), tmp_path / str(seed), seed))
        adapter = engine.adapters.load("policy", path)
        request = run(engine, prompts, 6, (adapter,))[0]
        check(engine, peft.PeftModel.from_pretrained(qwen3(), path).eval(), request)
        outcomes.append(request.logprobs)
        shapes.append(set(engine.static.shapes))
        other = engine.adapters.load("other", path)
        assert other.factors is not adapter.factors
        del adapter, request, other
    assert outcomes[0] != outcomes[1]
    assert shapes[0] == shapes[1]


def test_what_is_evicted_comes_back_in_place(tmp_path: Path) -> None:
    """Tied weights, an adapter, and layers that oneDNN has packed."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "initializer_range": 0.05, "tie_word_embeddings": True}
    engine = Engine(qwen3(**shape), max_model_len=256, max_num_seqs=40)
    adapter = engine.adapters.load("a", str(make_adapter(qwen3(**shape), tmp_path, 0)))
    prompts = random_prompts(*range(20, 60))
    before = run(engine, prompts, 6, (None, adapter))
    held = [*engine.model.parameters(), *engine.model.buffers(), *engine.adapters.tensors()]
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
    evictable = Evictable(held, pin=False)
    assert evictable.nbytes == sum(tensor.nbytes for tensor in held)
    for change in (0.0, 0.01):
        engine.reset_prefix_cache()
        with torch.no_grad():
            engine.model.model.norm.weight.add_(change)
        evictable.evict()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        evictable.restore()
        after = run(engine, prompts, 6, (None, adapter))
        same = [request.logprobs for request in after] == [request.logprobs for request in before]
        assert same == (not change), "what changed between two evictions is kept too"


@pytest.mark.slow
def test_sleep_returns_the_caches_memory_to_the_system() -> None:
    # 8 KiB of cache per token
    engine = Engine(qwen3(head_dim=128, num_key_value_heads=4), max_model_len=256, max_num_seqs=64)
    prompts = random_prompts(*range(180, 244))
    size = 64 * 256 * 2 * 2 * 4 * 128 * 4
    run(engine, prompts)
    process = psutil.Process()
    awake = process.memory_info().rss
    engine.sleep()
    assert awake - process.memory_info().rss > 0.8 * size
    engine.wake(weights=True, cache=True)
    (request,) = run(engine, prompts[:1])
    check(engine, qwen3(head_dim=128, num_key_value_heads=4).eval(), request)
