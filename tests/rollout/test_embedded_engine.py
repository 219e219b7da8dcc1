"""The decode loop alone: refused requests, and code paths that short HTTP requests do not reach."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from agentfactory.rollout.inference.embedded import engine as engine_module
from agentfactory.rollout.inference.embedded.device_memory import Evictable
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request, UnsupportedModel, sample
from tests.engine_runs import check, decode, finish, make_adapter, random_prompts
from tests.placement.shapes import sizes

pytestmark = pytest.mark.numbers

SIZES: dict[str, Any] = {
    **{**sizes(32, 64, 2, 4, 2, 97), "max_position_embeddings": 8192, "initializer_range": 0.3},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **changes}))


def test_what_is_not_a_number_spoils_no_later_sequence() -> None:
    model = qwen3()
    engine = Engine(model, max_model_len=64, max_num_seqs=2)
    prompts = [np.arange(1, 40), np.arange(50, 90)]
    healthy = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    assert [request.finish_reason for request in decode(engine, prompts)] == ["error", "error"]
    model.load_state_dict(healthy)
    for request in decode(engine, [prompt[:5] for prompt in prompts]):
        assert request.finish_reason == "length"
        check(qwen3(), request)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(5, 1.0, 1.0), (0, 0.7, 1.0), (9, 0.6, 0.7), (1, 0.1, 1.3)]
)
def test_limits_on_sampling_are_those_of_transformers(top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(1)) * 2
    warpers = [TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else [])]
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = logits.clone()
    for warp in warpers:
        expected = warp(torch.zeros(3, 1, dtype=torch.long), expected)
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    requests = [Request(np.array([1]), 1, lambda request: None, **limits) for _ in range(3)]
    tokens, logprobs = sample(logits.clone(), requests)
    torch.testing.assert_close(logprobs, expected.log_softmax(-1))
    assert all(expected[row, token].isfinite() for row, token in enumerate(tokens))


def test_models_that_it_cannot_decode_are_refused() -> None:
    sizes = {"max_model_len": 64, "max_num_seqs": 2}
    with pytest.raises(UnsupportedModel, match="layers of type linear_attention; only full_attention and sliding"):
        Engine(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, layer_types=["linear_attention"] * 2)), **sizes)
    with pytest.raises(MemoryError, match="lower max_num_seqs"):
        Engine(qwen3(), max_model_len=2**16, max_num_seqs=2**12)


def test_static_steps_equal_dynamic_ones(tmp_path: Path) -> None:
    """The base and two adapters: in one batch, alone, in the first slots, and in slots far apart."""
    sizes = {"max_model_len": 600, "max_num_seqs": 40}
    engines = Engine(qwen3(), **sizes), Engine(qwen3(), **sizes, static_decode=True)
    paths = [make_adapter(qwen3(), tmp_path / name, seed) for seed, name in enumerate("ab")]
    seen: list[list[Request]] = []
    for engine in engines:
        one, two = (engine.adapters.load(path.name, str(path)) for path in paths)
        done = decode(engine, random_prompts(*range(40, 75)), 9, (None, one, two))
        # they continue at the ends of the cache
        ends = [np.array([*done[i].prompt, *done[i].tokens, 5, 6]) for i in (0, 34)]
        done += decode(engine, ends, 6, (one,)) + decode(engine, ends[:1], 6, (None, one))
        done += decode(engine, random_prompts(1, 500), 30)
        seen.append(done)
    for dynamic, static in zip(*seen, strict=True):
        assert static.tokens == dynamic.tokens
        np.testing.assert_allclose(static.logprobs, dynamic.logprobs, atol=1e-4)
    assert engines[0].static is None
    shapes = list(engines[1].static._steps)
    assert {shape.viewed for shape in shapes} == {shape.mixed for shape in shapes} == {True, False}
    assert {len(shape.adapters) for shape in shapes} == {0, 1, 2}
    assert {shape.keys for shape in shapes} == {256, 512, 608}
    # a GPU needs to capture only a few shapes
    assert len(shapes) < 15


def test_static_steps_leave_other_slots_as_they_are() -> None:
    engine = Engine(qwen3(), max_model_len=256, max_num_seqs=8, static_decode=True)
    first = decode(engine, random_prompts(60, 61, 62))
    decode(engine, random_prompts(90, 91))
    # rows of unused slots were computed too
    for request, lines in zip(first, (60, 61, 62), strict=True):
        again = decode(engine, [np.array([*request.prompt, *request.tokens, 7])])[0]
        assert again.slot == request.slot
        assert len(request.prompt) == lines
        check(qwen3().eval(), again)


def test_static_steps_read_nothing_on_the_host(tmp_path: Path) -> None:
    engine = Engine(qwen3(), max_model_len=600, max_num_seqs=8, static_decode=True)
    adapter = engine.adapters.load("a", str(make_adapter(qwen3(), tmp_path, 0)))
    decode(engine, random_prompts(5, 6), 4, (None, adapter))
    _, step, _ = next(reversed(engine.static._steps.values()))
    # fake tensors have shapes but no values: code that needs a value raises here, and would abort a capture
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        logits = step()
        assert logits.shape == (8, 97)
        with pytest.raises(DynamicOutputShapeException):
            logits[logits > 0]
        with pytest.raises(DataDependentOutputException):
            logits.max().item()


def test_an_adapter_takes_the_place_of_one_that_has_gone(tmp_path: Path) -> None:
    """Captured steps keep reading from that memory."""
    engine = Engine(qwen3(), max_model_len=128, max_num_seqs=8, static_decode=True)
    prompts = random_prompts(30)
    outcomes, shapes = [], []
    for seed in (0, 1):
        path = str(make_adapter(qwen3(), tmp_path / str(seed), seed))
        adapter = engine.adapters.load("policy", path)
        request = decode(engine, prompts, 6, (adapter,))[0]
        check(peft.PeftModel.from_pretrained(qwen3(), path).eval(), request)
        outcomes.append(request.logprobs)
        shapes.append(set(engine.static._steps))
        other = engine.adapters.load("other", path)
        assert other.factors is not adapter.factors
        del adapter, request, other
    assert outcomes[0] != outcomes[1]
    assert shapes[0] == shapes[1]


def test_scored_prompts_come_in_chunks_of_few_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decoding requests, with and without adapters, and although their beginnings are in the cache."""
    monkeypatch.setattr(engine_module, "LOGIT_ELEMENTS", 97 * 7)
    base, path = qwen3().eval(), str(make_adapter(qwen3(), tmp_path, 1))
    made = peft.PeftModel.from_pretrained(qwen3(), path).eval()
    engine = Engine(qwen3(), max_model_len=128, max_num_seqs=6)
    adapter = engine.adapters.load("adapter", path)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 97, size) for size in (40, 2, 23, 1, 40, 31)]
    prompts[4] = prompts[0]
    decode(engine, [prompts[0]])
    largest = []
    forward = engine._forward

    def counted(*arguments: Any, **more: Any) -> torch.Tensor:
        logits = forward(*arguments, **more)
        largest.append(len(logits))
        return logits

    monkeypatch.setattr(engine, "_forward", counted)
    requests = [Request(prompt, 5, lambda request: None) for prompt in prompts]
    for number, request in enumerate(requests):
        request.adapter = adapter if number % 2 else None
        # the last two only decode
        request.prompt_logprobs, request.fresh = (number, True) if number < 4 else (None, False)
    finish(engine, *requests)
    assert max(largest) <= 7 + len(requests)
    for number, request in enumerate(requests):
        network = made if number % 2 else base
        check(network, request)
        if number >= 4:
            assert request.prompt_scores == {}
            continue
        with torch.no_grad():
            wanted = network(input_ids=torch.tensor(request.prompt)[None]).logits[0, :-1].log_softmax(-1)
        assert sorted(request.prompt_scores) == [*range(1, len(request.prompt))]
        for place, score in request.prompt_scores.items():
            line, token = wanted[place - 1], int(request.prompt[place])
            assert score.logprob == pytest.approx(float(line[token]), abs=1e-4)
            torch.testing.assert_close(torch.tensor(score.logprobs), line.topk(number).values, atol=1e-4, rtol=0)
            assert len(score.likely) == number


def test_what_is_evicted_comes_back_in_place(tmp_path: Path) -> None:
    """With tied weights, an adapter, and layers packed by oneDNN."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "initializer_range": 0.05, "tie_word_embeddings": True}
    engine = Engine(qwen3(**shape), max_model_len=256, max_num_seqs=40)
    adapter = engine.adapters.load("a", str(make_adapter(qwen3(**shape), tmp_path, 0)))
    prompts = random_prompts(*range(20, 60))
    before = decode(engine, prompts, 6, (None, adapter))
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
        after = decode(engine, prompts, 6, (None, adapter))
        same = [request.logprobs for request in after] == [request.logprobs for request in before]
        assert same == (not change), "what changed between two evictions is kept too"


@pytest.mark.slow
def test_sleep_returns_the_caches_memory_to_the_system() -> None:
    # 8 KiB of cache per token
    engine = Engine(qwen3(head_dim=128, num_key_value_heads=4), max_model_len=256, max_num_seqs=64)
    prompts = random_prompts(*range(180, 244))
    size = 64 * 256 * 2 * 2 * 4 * 128 * 4
    decode(engine, prompts)
    process = psutil.Process()
    awake = process.memory_info().rss
    engine.sleep()
    assert awake - process.memory_info().rss > 0.8 * size
    engine.wake(weights=True, cache=True)
    (request,) = decode(engine, prompts[:1])
    check(qwen3(head_dim=128, num_key_value_heads=4).eval(), request)
