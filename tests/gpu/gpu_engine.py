"""The embedded engine on a GPU: decoding by CUDA graphs, precision, and what sleep gives back to other processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.engine_runs import check, decode, random_prompts
from tests.gpu.models import DEVICE, NEEDS_GPU, VOCABULARY, recipe
from tests.server_process import serve
from tests.trainers.scored import fill_adapters

pytestmark = NEEDS_GPU
MAX_MODEL_LEN, MAX_NUM_SEQS = 1024, 64


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()


def make_engine(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    return Engine(load(path, dtype), max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, **options)


def prompts_of(*lengths: int) -> list[np.ndarray]:
    return random_prompts(*lengths, vocabulary=VOCABULARY)


def save_adapter(path: Path, folder: Path, seed: int) -> Path:
    """An adapter that changes what the model says."""
    made = recipe(path, lora={"rank": 8})
    made.seed = seed
    policy = load_policy(made)
    fill_adapters(policy, 0.05, torch.Generator().manual_seed(seed))
    policy.save_adapter(folder, policy.gather())
    return folder


def test_decode_by_graphs_equals_decode_without(small: Path, tmp_path: Path) -> None:
    """Base and two adapters in one batch, in the first slots and in slots that lie far apart, before and after sleep;
    and adapters that come after others in the same memory."""
    engines = make_engine(small, static_decode=False), make_engine(small)
    assert engines[0].static is None
    assert engines[1].static is not None, "the graphs were given up: see the warning"
    paths = [save_adapter(small, tmp_path / str(seed), seed) for seed in range(3)]
    seen: list[list[Request]] = []
    for engine in engines:
        one, two = (engine.adapters.load(path.name, str(path)) for path in paths[:2])
        done = decode(engine, prompts_of(*range(40, 95)), 20, (None, one, two))
        ends = [np.array([*done[i].prompt, *done[i].tokens, 5, 6]) for i in (0, 54)]
        done += decode(engine, ends, 12, (one,))
        place = id(one.factors)
        del one
        for request in done:
            request.adapter = None
        three = engine.adapters.load("three", str(paths[2]))
        assert id(three.factors) == place
        done += decode(engine, ends, 12, (three,)) + decode(engine, prompts_of(500), 60)
        before = torch.cuda.memory_allocated()
        engine.sleep()
        assert torch.cuda.memory_allocated() < before
        engine.wake(weights=True, cache=True)
        seen.append(done + decode(engine, prompts_of(30, 31), 12, (two, three)))
    for plain, graphed in zip(*seen, strict=True):
        assert graphed.tokens == plain.tokens
        np.testing.assert_allclose(graphed.logprobs, plain.logprobs, atol=1e-3)


@pytest.mark.parametrize("graphs", [False, True])
def test_bfloat16_follows_float32(small: Path, graphs: bool) -> None:
    engine, exact = make_engine(small, torch.bfloat16, static_decode=graphs), load(small)
    for request in decode(engine, prompts_of(*range(20, 60)), 24):
        check(exact, request, atol=0.3)


@pytest.fixture(scope="module")
def server(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerControl]:
    """0.2 GB of weights and 2 GiB of cache, in a process of its own."""
    section = {"engine": "embedded", "max_model_len": 2048, "max_num_seqs": 64}
    policy = {"path": str(large), "dtype": "bfloat16", "lora": {"rank": 8}}
    with serve({"model": policy, "server": section}, tmp_path_factory.mktemp("server")) as url:
        yield ServerControl(url)


WEIGHTS = 2 * 101_206_016
CACHE = 2 * 8 * 2 * 64 * 2048 * 512
"""Bytes of the server's cache: bfloat16, layers, keys and values, slots, tokens, features."""


def free() -> int:
    """Bytes that no process has taken."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def greedy(server: ServerControl, model: str = "policy") -> list[int]:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    body = {"token_ids": list(range(9, 90)), "model": model, "sampling_params": params}
    return server.post("/inference/v1/generate", body)["choices"][0]["token_ids"]


def test_sleep_frees_the_gpu_and_wake_up_restores(server: ServerControl, large: Path, tmp_path: Path) -> None:
    path = save_adapter(large, tmp_path / "adapter", 1)
    server.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(path)})
    said = greedy(server), greedy(server, "one")
    assert said[0] != said[1]
    sums = server.post("/weight_checker", {"action": "checksum"})
    for _ in range(2):
        awake = free()
        server.post("/sleep?level=1&mode=abort")
        assert free() - awake > 0.95 * (WEIGHTS + CACHE)
        server.post("/wake_up?tags=weights")
        assert awake + 0.95 * CACHE < free() < awake + 1.2 * CACHE
        assert server.post("/weight_checker", {"action": "checksum"}) == sums
        server.post("/wake_up?tags=kv_cache")
        assert abs(free() - awake) < 0.1 * CACHE
        assert (greedy(server), greedy(server, "one")) == said
    server.post("/v1/unload_lora_adapter", {"lora_name": "one"})


def test_a_wake_up_without_memory_leaves_the_server_asleep(server: ServerControl) -> None:
    said = greedy(server)
    server.post("/sleep?level=1&mode=abort")
    # room for the weights, and not for the cache
    taken = torch.empty(free() - WEIGHTS - CACHE // 2, dtype=torch.uint8, device=DEVICE)
    for tags in ("", "?tags=kv_cache"):
        with pytest.raises(SyncError, match="cannot wake up, stays asleep: the KV cache"):
            server.post("/wake_up" + tags)
        assert server.get("/is_sleeping")["is_sleeping"] is True
    # the weights were not left there
    assert free() > 0.9 * (WEIGHTS + CACHE // 2)
    del taken
    free()
    server.post("/wake_up")
    assert greedy(server) == said
