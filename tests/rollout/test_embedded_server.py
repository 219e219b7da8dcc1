"""The embedded engine's features beyond `test_server_contract.py`, in real processes over HTTP."""

import asyncio
import base64
import pickle
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import aiohttp
import peft
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentfactory.rollout.inference.http_transport import authorization
from tests.forked import ENGINE, Forked, start_engine
from tests.server_process import busy

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # far from uniform, so that a wrong key or position shows
    "eos_token_id": 96,
    "bos_token_id": None,
    "pad_token_id": None,
}
MAX_MODEL_LEN = 2000
KEY = "s3cret"


def make_model(folder: Path, kind: str = "qwen3", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return folder


class Running:
    """A server, and a client's operations on it."""

    def __init__(self, model: Path, *flags: str, **environment: str) -> None:
        self.model = model
        self.process, self.url = start_engine(model, *flags, log=model.with_suffix(".log"), **environment)

    def stop(self) -> int:
        return self.process.kill(signal.SIGTERM)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    folder = tmp_path_factory.mktemp("models")
    flags = ("--max-model-len", str(MAX_MODEL_LEN))
    qwen3 = Running(make_model(folder / "qwen3"), *flags, "--max-num-seqs", "12")
    # a cache of 125 MiB, of which the tests touch little
    flags += ("--max-num-seqs", "512")
    llama = Running(make_model(folder / "llama", "llama"), *flags, "--api-key-env", "TEST_KEY", TEST_KEY=KEY)
    yield qwen3, llama
    assert qwen3.stop() == 0
    assert llama.stop() == 0


class Client:
    def __init__(self, server: Running, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        async with self.session.post(self.server.url + path, json=body) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(self.server.url + path) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content

    async def generate(self, ids: list[int], *, model: str = "policy", status: int = 200, **params: Any) -> Any:
        params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, **params}
        body = {"token_ids": ids, "sampling_params": params, "model": model}
        content = await self.post("/inference/v1/generate", body, status)
        return content["choices"][0] if status == 200 else content["error"]["message"]

    async def update(self, weights: Path, version: str) -> None:
        await self.post("/start_weight_update")
        await self.post("/update_weights", {"update_info": {"path": str(weights)}})
        await self.post("/finish_weight_update", {"weight_version": version})


@pytest_asyncio.fixture
async def client(servers: tuple[Running, Running]) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers=authorization(servers[0].url, None)) as session:
        client = Client(servers[0], session)
        yield client
        # the next test starts with the initial weights and an empty cache, whatever this one did
        await client.post("/wake_up")
        await client.post("/resume")
        await client.update(client.server.model / "model.safetensors", "0")
        assert (await client.post("/reset_prefix_cache"))["success"]


@pytest_asyncio.fixture
async def llama(servers: tuple[Running, Running]) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        yield Client(servers[1], session)


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def expected_logprobs(model: torch.nn.Module, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


def check_logprobs(model: torch.nn.Module, prompt: list[int], choice: Any, temperature: float = 1.0) -> None:
    entries = choice["logprobs"]["content"]
    assert [e["token_id"] for e in entries] == choice["token_ids"]
    got = torch.tensor([e["logprob"] for e in entries])
    torch.testing.assert_close(
        got, expected_logprobs(model, prompt, choice["token_ids"], temperature), atol=1e-4, rtol=0
    )


def some_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def shifted(model: Path, target: Path, **change: torch.Tensor) -> Path:
    """The model's weights, all multiplied by 1.1, with some tensors replaced."""
    tensors = {name: tensor * 1.1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file({**tensors, **change}, target)
    return target


@pytest.mark.processes
async def test_greedy_equals_generate(client: Client, llama: Client) -> None:
    for each in (client, llama):
        model = reference(each.server.model)
        for length in (1, 3, 40, 300):
            prompt = some_ids(length)
            choice = await each.generate(prompt, temperature=0, max_tokens=24)
            assert choice["token_ids"] == greedy(model, prompt, 24)
            assert choice["finish_reason"] == "length"
            check_logprobs(model, prompt, choice)


async def test_concurrent_logprobs_equal_transformers(client: Client, llama: Client) -> None:
    for each in (client, llama):
        model = reference(each.server.model)
        cases = [(some_ids(n, n), t) for n in (1, 2, 17, 33, 70, 150, 400, 1500) for t in (0.7, 1.0, 1.6)]
        prompts = [prompt for prompt, _ in cases]
        choices = await asyncio.gather(
            *[each.generate(p, temperature=t, max_tokens=5 + i) for i, (p, t) in enumerate(cases)]
        )
        for i, (prompt, (_, temperature), choice) in enumerate(zip(prompts, cases, choices, strict=True)):
            assert len(choice["token_ids"]) == 5 + i
            check_logprobs(model, prompt, choice, temperature)


async def test_seed_decides_the_sample_whatever_the_batch(client: Client) -> None:
    prompt = some_ids(30)
    alone = await client.generate(prompt, seed=7, max_tokens=30)
    others = [client.generate(some_ids(20 + i, i), max_tokens=30) for i in range(8)]
    crowded, *_ = await asyncio.gather(client.generate(prompt, seed=7, max_tokens=30), *others)
    assert alone["token_ids"] == crowded["token_ids"]
    assert alone["token_ids"] != (await client.generate(prompt, seed=8, max_tokens=30))["token_ids"]


async def test_samples_follow_the_distribution(client: Client) -> None:
    prompt = some_ids(30)
    choices = await asyncio.gather(*[client.generate(prompt, max_tokens=1, temperature=2.0) for _ in range(600)])
    drawn = torch.bincount(torch.tensor([c["token_ids"][0] for c in choices]), minlength=97) / 600
    with torch.no_grad():
        logits = reference(client.server.model)(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert (drawn - torch.softmax(logits / 2.0, -1)).abs().max() < 0.1


async def test_full_update(client: Client, tmp_path: Path) -> None:
    prompt = some_ids(30)
    before = await client.generate(prompt, temperature=0)
    assert before["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    old = await client.post("/weight_checker", {"action": "checksum"})
    weights = shifted(client.server.model, tmp_path / "new.safetensors")
    await client.update(weights, "1")
    await client.post("/reset_prefix_cache")
    after = await client.generate(prompt, temperature=0)
    assert after["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    assert await client.get("/weight_info") == {"weight_version": "1"}
    model = reference(client.server.model)
    model.load_state_dict(load_file(weights), strict=False)
    check_logprobs(model, prompt, after)
    new = await client.post("/weight_checker", {"action": "checksum"})
    assert old["checksums"].keys() == new["checksums"].keys() == dict(model.named_parameters()).keys()
    assert all(old["checksums"][name] != new["checksums"][name] for name in new["checksums"])


async def test_wrong_weights_change_nothing(client: Client, tmp_path: Path) -> None:
    old = await client.post("/weight_checker", {"action": "checksum"})
    tensors = load_file(shifted(client.server.model, tmp_path / "good.safetensors"))
    norm = "model.norm.weight"
    embed = tensors["model.embed_tokens.weight"]
    broken = {
        "lacks the tensor model.norm.weight": {k: v for k, v in tensors.items() if k != norm},
        "has no tensor model.nonsense": {**tensors, "model.nonsense": torch.zeros(1)},
        "model.norm.weight has shape (5,)": {**tensors, norm: torch.zeros(5)},
        "are tied but differ": {**tensors, "lm_head.weight": embed + 1},
    }
    for message, content in broken.items():
        save_file(content, tmp_path / "bad.safetensors")
        info = {"update_info": {"path": str(tmp_path / "bad.safetensors")}}
        assert "/start_weight_update first" in (await client.post("/update_weights", info, 400))["error"]["message"]
        await client.post("/start_weight_update")
        assert message in (await client.post("/update_weights", info, 400))["error"]["message"]
        await client.post("/finish_weight_update", {"weight_version": "1"}, 400)
        await client.post("/finish_weight_update")
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors here")
    await client.post("/start_weight_update")
    for path in ("bad.safetensors", "none.safetensors"):
        await client.post("/update_weights", {"update_info": {"path": str(tmp_path / path)}}, 400)
    assert await client.post("/weight_checker", {"action": "checksum"}) == old
    # either name of tied tensors will do
    del tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed}, tmp_path / "head.safetensors")
    await client.post("/update_weights", {"update_info": {"path": str(tmp_path / "head.safetensors")}})
    await client.post("/finish_weight_update", {"weight_version": "1"})
    assert await client.post("/weight_checker", {"action": "checksum"}) != old


async def test_an_update_that_was_begun_is_completed(client: Client) -> None:
    size = 4 * SIZES["hidden_size"]
    block = SharedMemory(create=True, size=size)
    part = {
        "names": ["model.norm.weight"],
        "dtype_names": ["float32"],
        "shapes": [[SIZES["hidden_size"]]],
        "tensor_sizes": [size],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps({"cpu": (block.name, size)})).decode(),
    }
    weights = {"update_info": {"path": str(client.server.model / "model.safetensors")}}
    old = await client.post("/weight_checker", {"action": "checksum"})
    await client.post("/start_weight_update")
    await client.post("/update_weights", {"update_info": part})
    block.close()
    block.unlink()
    assert await client.post("/weight_checker", {"action": "checksum"}) != old
    waiting = asyncio.create_task(client.generate(some_ids(30)))
    # neither without the rest nor without a label, even after a restart of the sender
    for version, status, message in (("1", 400, "lacks the tensor"), (None, 409, "have been overwritten")):
        answer = await client.post("/finish_weight_update", {"weight_version": version}, status)
        assert message in answer["error"]["message"]
    await client.post("/pause?mode=keep")
    for _ in range(2):
        await client.post("/start_weight_update")
        await client.post("/finish_weight_update", status=409)
        answer = await client.post("/finish_weight_update", {"weight_version": "1"}, 400)
        assert "no weights were updated" in answer["error"]["message"]
    await client.post("/update_weights", weights)
    await client.post("/finish_weight_update", status=409)
    assert not waiting.done()
    await client.post("/finish_weight_update", {"weight_version": "1"})
    await client.post("/resume")
    assert await client.post("/weight_checker", {"action": "checksum"}) == old
    assert (await waiting)["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    # no state carries over to the next update
    await client.post("/start_weight_update")
    await client.post("/finish_weight_update")


async def test_after_an_update_whose_sender_died_a_server_can_sleep_and_is_updated_anew(client: Client) -> None:
    """The next attempt of a time-sharing trainer does this."""
    weights = {"update_info": {"path": str(client.server.model / "model.safetensors")}}
    await client.post("/start_weight_update")
    await client.post("/sleep", status=409)
    await client.post("/update_weights", weights)
    await client.post("/sleep")
    answer = await client.post("/update_weights", weights, 409)
    assert "the weights are asleep" in answer["error"]["message"]
    await client.post("/wake_up?tags=weights")
    await client.post("/start_weight_update")
    await client.post("/update_weights", weights)
    await client.post("/finish_weight_update", {"weight_version": "1"})
    await client.post("/wake_up?tags=kv_cache")
    assert (await client.generate(some_ids(5)))["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]


async def test_a_salt_keeps_requests_from_caches_of_others(client: Client, tmp_path: Path) -> None:
    prompt, params = some_ids(60), {"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}

    async def salted(salt: str) -> Any:
        body = {"token_ids": prompt, "sampling_params": params, "cache_salt": salt}
        return (await client.post("/inference/v1/generate", body))["choices"][0]

    await salted("0")
    weights = shifted(client.server.model, tmp_path / "new.safetensors")
    await client.update(weights, "1")
    model = reference(client.server.model)
    model.load_state_dict(load_file(weights), strict=False)
    check_logprobs(model, prompt, await salted("1"))
    check_logprobs(model, prompt, await client.generate(prompt, temperature=0))
    stale = await salted("0")
    with pytest.raises(AssertionError):
        check_logprobs(model, prompt, stale)
    body = {"token_ids": prompt, "sampling_params": params, "cache_salt": ""}
    assert "cache_salt: ''" in (await client.post("/inference/v1/generate", body, 400))["error"]["message"]


async def test_what_cannot_be_done_while_requests_run_is_refused(client: Client) -> None:
    running = asyncio.create_task(client.generate(some_ids(30), max_tokens=1500))
    await busy(client.server.url)
    assert "POST /pause first" in (await client.post("/start_weight_update", status=409))["error"]["message"]
    refusal = await client.post("/pause?mode=soon", status=400)
    assert "'soon' is not one of abort, wait, keep" in refusal["error"]["message"]
    await client.post("/pause")
    assert (await running)["finish_reason"] == "abort"


async def test_a_client_that_leaves_frees_its_slot(client: Client) -> None:
    running = [asyncio.create_task(client.generate(some_ids(9, i), max_tokens=1900)) for i in range(20)]
    await busy(client.server.url, 12)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.generate(some_ids(5))
    assert (await client.post("/reset_prefix_cache")) == {"success": True}


def make_adapter(model: Path, folder: Path, seed: int, **config: Any) -> Path:
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(reference(model), peft.LoraConfig(**{"target_modules": "all-linear", **config}))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(folder)
    return folder


async def test_adapters_and_base_in_one_batch(client: Client, tmp_path: Path) -> None:
    model = client.server.model
    paths = {
        "run-1": make_adapter(model, tmp_path / "a", 1, r=4, lora_alpha=8),
        "run-2": make_adapter(model, tmp_path / "b", 2, r=8, lora_alpha=4, use_rslora=True, target_modules=["q_proj"]),
    }
    for name, path in paths.items():
        await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    models = (await client.get("/v1/models"))["data"]
    assert [(m["id"], m["parent"]) for m in models] == [("policy", None), ("run-1", "policy"), ("run-2", "policy")]
    references: dict[str, torch.nn.Module] = {"policy": reference(model)}
    for name, path in paths.items():
        references[name] = peft.PeftModel.from_pretrained(reference(model), path).eval()
    prompt = some_ids(50)
    cases = [name for name in references for _ in range(4)]
    for _ in range(2):  # the second time from the cache, which no two models may share
        choices = await asyncio.gather(*[client.generate(prompt, model=name, max_tokens=12) for name in cases])
        for name, choice in zip(cases, choices, strict=True):
            check_logprobs(references[name], prompt, choice)
            version = "0" if name == "policy" else name
            assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 12}]

    async def refused(name: str, path: Path) -> str:
        body = {"lora_name": name, "lora_path": str(path)}
        return (await client.post("/v1/load_lora_adapter", body, 400))["error"]["message"]

    assert "already been loaded" in await refused("run-1", paths["run-2"])
    # unloading takes the name away at once; a request in flight finishes with its adapter
    running = asyncio.create_task(client.generate(prompt, model="run-2", max_tokens=1500))
    await busy(client.server.url)
    await client.post("/v1/unload_lora_adapter", {"lora_name": "run-2"})
    assert "does not exist" in await client.generate(prompt, model="run-2", status=404)
    check_logprobs(references["run-2"], prompt, await running)
    await client.post("/v1/unload_lora_adapter", {"lora_name": "run-2"}, 404)
    # the same name with other weights does not hit the old cache entries
    await client.post("/v1/unload_lora_adapter", {"lora_name": "run-1"})
    await client.post("/v1/load_lora_adapter", {"lora_name": "run-1", "lora_path": str(paths["run-2"])})
    check_logprobs(references["run-2"], prompt, await client.generate(prompt, model="run-1"))
    bad = {
        "use_dora": {"use_dora": True},
        "bias": {"bias": "lora_only"},
        "modules_to_save": {"modules_to_save": ["norm"]},
    }
    for word, config in bad.items():
        assert word in await refused("bad", make_adapter(model, tmp_path / word, 3, **config))
    assert "not a readable adapter folder" in await refused("bad", tmp_path / "nowhere")
    await client.post("/v1/unload_lora_adapter", {"lora_name": "run-1"})


async def test_sleep_and_wake(client: Client) -> None:
    prompt = some_ids(40)
    before = await client.generate(prompt, temperature=0)
    running = asyncio.create_task(client.generate(prompt, temperature=0, max_tokens=1000))
    await busy(client.server.url)
    assert "requests are running" in (await client.post("/sleep?level=1", status=409))["error"]["message"]
    await client.post("/sleep?level=1&mode=keep")
    assert await client.get("/is_sleeping") == {"is_sleeping": True}
    assert "asleep" in await client.generate(prompt, status=503)
    assert (await client.post("/wake_up?tags=weights"))["status"] == "sleeping"
    assert (await client.post("/wake_up"))["status"] == "awake"
    assert await client.get("/is_sleeping") == {"is_sleeping": False}
    check_logprobs(reference(client.server.model), prompt, await running)
    assert (await client.generate(prompt, temperature=0))["token_ids"] == before["token_ids"]
    await client.post("/sleep?level=2", status=400)


async def test_kept_requests_are_not_waited_for_while_anything_is_asleep(client: Client) -> None:
    running = asyncio.create_task(client.generate(some_ids(40), max_tokens=1000))
    await busy(client.server.url)
    await client.post("/sleep?mode=keep")
    await client.post("/wake_up?tags=weights")
    for route in ("/sleep?mode=wait", "/pause?mode=wait"):
        assert "POST /wake_up first" in (await client.post(route, status=409))["error"]["message"]
    # which has changed nothing
    assert await client.get("/is_paused") == {"is_paused": False}
    await client.post("/wake_up")
    assert (await running)["finish_reason"] == "length"


async def test_a_client_that_leaves_while_it_waits_for_sleep_pauses_nobody(client: Client) -> None:
    running = asyncio.create_task(client.generate(some_ids(40), max_tokens=1900))
    await busy(client.server.url)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.post("/sleep?mode=wait"), 0.1)
    await client.generate(some_ids(5))
    assert not running.done(), "it was not what was waited for"
    assert await client.get("/is_paused") == {"is_paused": False}
    await client.post("/pause")
    await running


async def test_adapters_and_weights_outlast_sleep(client: Client, tmp_path: Path) -> None:
    path = make_adapter(client.server.model, tmp_path / "a", 1, r=4)
    await client.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(path)})
    old = await client.post("/weight_checker", {"action": "checksum"})
    await client.post("/sleep")
    for route, body in (("/weight_checker", {"action": "checksum"}), ("/start_weight_update", None)):
        assert "wake_up?tags=weights first" in (await client.post(route, body, 409))["error"]["message"]
    await client.post("/wake_up?tags=weights")
    assert await client.post("/weight_checker", {"action": "checksum"}) == old
    await client.post("/start_weight_update")
    assert "finish_weight_update first" in (await client.post("/sleep", status=409))["error"]["message"]
    await client.post("/finish_weight_update")
    # a woken server goes back to sleep
    await client.post("/sleep")
    await client.post("/weight_checker", {"action": "checksum"}, 409)
    assert (await client.post("/wake_up?tags=kv_cache"))["status"] == "sleeping"
    assert (await client.post("/wake_up?tags=weights"))["status"] == "awake"
    prompt = some_ids(40)
    adapted = peft.PeftModel.from_pretrained(reference(client.server.model), path).eval()
    check_logprobs(adapted, prompt, await client.generate(prompt, model="a"))
    await client.post("/v1/unload_lora_adapter", {"lora_name": "a"})


async def test_a_wake_up_without_memory_leaves_the_server_asleep(llama: Client) -> None:
    before = await llama.generate(some_ids(40), temperature=0)
    await llama.post("/sleep")
    process = psutil.Process(llama.server.process.pid)
    limits = process.rlimit(psutil.RLIMIT_AS)
    # 32 of the cache's 125 MiB are allocated
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 2**25, limits[1]))
    for tags in ("?tags=kv_cache", "", "?tags=kv_cache"):
        answer = (await llama.post("/wake_up" + tags, status=500))["error"]["message"]
        assert "cannot wake up, stays asleep: the KV cache needs 0.1 GiB" in answer
        assert await llama.get("/is_sleeping") == {"is_sleeping": True}
    await llama.post("/weight_checker", {"action": "checksum"}, 409)
    process.rlimit(psutil.RLIMIT_AS, limits)
    assert (await llama.post("/wake_up"))["status"] == "awake"
    after = await llama.generate(some_ids(40), temperature=0)
    assert after["token_ids"] == before["token_ids"]


async def test_a_bias_acts_before_the_temperature_on_its_own_request_only(client: Client) -> None:
    model = AutoModelForCausalLM.from_pretrained(client.server.model, dtype=torch.float32).eval()
    prompt, bias = [5, 6, 7, 8], {"11": 4.5, "12": -100.0}
    choices = await asyncio.gather(
        *[client.generate(prompt, temperature=0.7, max_tokens=20, **({"logit_bias": bias} if i % 2 else {}))
          for i in range(8)]
    )  # fmt: skip
    for index, choice in enumerate(choices):
        tokens = torch.tensor(choice["token_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        for token, added in bias.items() if index % 2 else ():
            logits[:, int(token)] += added
        wanted = torch.log_softmax(logits / 0.7, -1).gather(1, tokens[:, None])[:, 0]
        got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


async def test_the_prompts_ids_are_returned_on_request(client: Client) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}, "return_token_ids": True}
    answer = await client.post("/inference/v1/generate", body)
    assert (answer["prompt_token_ids"], answer["mm_placeholders"]) == ([5, 6], None)
    assert "prompt_token_ids" not in await client.post("/inference/v1/generate", {**body, "return_token_ids": False})


async def test_older_clients_of_vllm_find_the_token_as_text(client: Client) -> None:
    params = {"logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [95], "routed_experts_prompt_start": 1}
    choice = await client.generate(some_ids(5), **params)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    check_logprobs(reference(client.server.model), some_ids(5), choice)


async def test_error_answers(client: Client) -> None:
    assert await client.generate([1], model="other", status=404) == "The model `other` does not exist."
    long = await client.generate([1] * MAX_MODEL_LEN, status=400)
    assert long.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
    full = await client.generate([1] * (MAX_MODEL_LEN - 3), max_tokens=99)
    assert (len(full["token_ids"]), full["finish_reason"]) == (3, "length")
    assert "token_ids" in await client.generate([], status=400)
    assert "from 0 to 96" in await client.generate([97], status=400)
    assert "from 0 to 96" in await client.generate([-1], status=400)
    for ids in ([1.5], ["a"], [[1], [1, 2]], [True], None, [2**70]):
        assert "token_ids: must be a list of integers" in await client.generate(ids, status=400)  # type: ignore[arg-type]
    for params in (
        {"top_p": 0.9},
        {"top_k": 5},
        {"guided": 1},
        {"temperature": -1},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"logprobs": 2},
        {"seed": "x"},
        {"stop_token_ids": "x"},
        {"logit_bias": [1]},
        {"logit_bias": {"97": 1.0}},
        {"logit_bias": {"word": 1.0}},
        {"logit_bias": {"3": "much"}},
    ):
        assert next(iter(params)) in await client.generate([1], status=400, **params)
    await client.generate([1], top_p=1.0, top_k=0)
    body = {"token_ids": [1], "sampling_params": {}, "wrong": 1}
    assert "wrong" in (await client.post("/inference/v1/generate", body, 400))["error"]["message"]
    part = {"type": "image_url", "url": "data:image/png;base64,AAAA", "uuid": "a"}
    body = {"token_ids": [1], "sampling_params": {}, "content_parts": [part]}
    assert "reads only text" in (await client.post("/inference/v1/generate", body, 400))["error"]["message"]
    assert "JSON object" in (await client.post("/inference/v1/generate", [1], 400))["error"]["message"]
    await client.post("/nowhere", status=404)
    await client.get("/pause", status=405)
    await client.post("/weight_checker", {"action": "reset"}, 400)
    async with client.session.post(client.server.url + "/inference/v1/generate", data=b"{") as answer:
        assert answer.status == 400


async def test_api_key_guards_everything_but_health(servers: tuple[Running, Running]) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        async with aiohttp.ClientSession(headers=headers) as session:
            stranger = Client(servers[1], session)
            await stranger.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}, 401)
            await stranger.post("/pause", status=401)
            await stranger.get("/v1/models", 401)
            await stranger.get("/health")


@pytest.mark.processes
def test_start_up_errors(servers: tuple[Running, Running], tmp_path: Path) -> None:
    def fails(*flags: str) -> str:
        engine = Forked(ENGINE, *flags, log=tmp_path / "log", HF_HUB_OFFLINE="1")
        assert engine.wait() == 2
        return engine.log.read_text().strip().splitlines()[-1]

    model = str(servers[0].model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in fails(model, "--port", port)
    assert "needs --api-key-env" in fails(model, "--port", "0", "--host", "0.0.0.0")
    assert "NO_SUCH_KEY: this environment variable is not set" in fails(
        model, "--port", "0", "--api-key-env", "NO_SUCH_KEY"
    )
    assert "cannot load the model" in fails(str(tmp_path / "none"), "--port", "0")
