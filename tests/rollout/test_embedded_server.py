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

from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.inference.server_command_line import explain
from tests.chat_tokenizers import make_tokenizer
from tests.forked import ENGINE, Forked, start_engine
from tests.rollout.test_server_contract import (
    Client,
    check_logprobs,
    make_adapter,
    make_model,
    reference,
    shifted,
    some_ids,
)
from tests.server_process import busy

MAX_MODEL_LEN = 2000
HIDDEN, VOCABULARY = 128, len(make_tokenizer())
KEY = "s3cret"


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
    qwen3 = Running(make_model(folder / "tied", tied=True), *flags, "--max-num-seqs", "12")
    # a cache of 125 MiB, of which the tests touch little
    flags += ("--max-num-seqs", "64")
    llama = Running(make_model(folder / "untied", tied=False), *flags, "--api-key-env", "TEST_KEY", TEST_KEY=KEY)
    yield qwen3, llama
    assert qwen3.stop() == 0
    assert llama.stop() == 0


async def refusal(client: Client, path: str, body: Any = None, status: int = 400) -> str:
    """The message of a refused request."""
    message: str = (await client.post(path, body, status))["error"]["message"]
    return message


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
    drawn = torch.bincount(torch.tensor([c["token_ids"][0] for c in choices]), minlength=VOCABULARY) / 600
    with torch.no_grad():
        logits = reference(client.server.model)(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert (drawn - torch.softmax(logits / 2.0, -1)).abs().max() < 0.1


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
        assert "/start_weight_update first" in await refusal(client, "/update_weights", info)
        await client.post("/start_weight_update")
        assert message in await refusal(client, "/update_weights", info)
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
    size = 4 * HIDDEN
    block = SharedMemory(create=True, size=size)
    part = {
        "names": ["model.norm.weight"],
        "dtype_names": ["float32"],
        "shapes": [[HIDDEN]],
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
        assert message in await refusal(client, "/finish_weight_update", {"weight_version": version}, status)
    await client.post("/pause?mode=keep")
    for _ in range(2):
        await client.post("/start_weight_update")
        await client.post("/finish_weight_update", status=409)
        assert "no weights were updated" in await refusal(client, "/finish_weight_update", {"weight_version": "1"})
    await client.post("/update_weights", weights)
    await client.post("/finish_weight_update", status=409)
    assert not waiting.done()
    await client.post("/finish_weight_update", {"weight_version": "1"})
    await client.post("/resume")
    assert await client.post("/weight_checker", {"action": "checksum"}) == old
    assert (await waiting)["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    # no state carries over to the next update, which holds the server
    await client.post("/start_weight_update")
    await client.post("/resume", status=409)
    assert await client.get("/is_paused") == {"is_paused": True}
    await client.post("/finish_weight_update")


async def test_after_an_update_whose_sender_died_a_server_can_sleep_and_is_updated_anew(client: Client) -> None:
    """The next attempt of a time-sharing trainer does this."""
    weights = {"update_info": {"path": str(client.server.model / "model.safetensors")}}
    await client.post("/start_weight_update")
    await client.post("/sleep", status=409)
    await client.post("/update_weights", weights)
    await client.post("/sleep")
    assert "the weights are asleep" in await refusal(client, "/update_weights", weights, 409)
    await client.post("/wake_up?tags=weights")
    await client.post("/start_weight_update")
    await client.post("/update_weights", weights)
    await client.post("/finish_weight_update", {"weight_version": "1"})
    await client.post("/wake_up?tags=kv_cache")
    assert (await client.generate(some_ids(5)))["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]


async def test_what_cannot_be_done_while_requests_run_is_refused(client: Client) -> None:
    running = asyncio.create_task(client.generate(some_ids(30), max_tokens=1500))
    await busy(client.server.url)
    assert "POST /pause first" in await refusal(client, "/start_weight_update", status=409)
    assert "'soon' is not one of abort, wait, keep" in await refusal(client, "/pause?mode=soon")
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


async def test_adapters_beyond_the_contract(client: Client, tmp_path: Path) -> None:
    """Scaled by rank, with the weights that a name has now; and what cannot be served."""
    prompt, known = some_ids(50), make_adapter(client.server.model, tmp_path / "a", 1)
    config = {"lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj"]}
    path = make_adapter(client.server.model, tmp_path / "b", 2, **config)
    scaled = peft.PeftModel.from_pretrained(reference(client.server.model), path).eval()
    for folder in (known, path):
        await client.post("/v1/load_lora_adapter", {"lora_name": "run", "lora_path": str(folder)})
        choice = await client.generate(prompt, model="run")
        assert choice["weight_versions"] == [{"version": "run", "start": 0, "end": 8}]
        await client.post("/v1/unload_lora_adapter", {"lora_name": "run"})
    check_logprobs(scaled, prompt, choice)
    refused = {"use_dora": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["norm"]}, "not a readable": None}
    for word, config in refused.items():
        if config is not None:
            make_adapter(client.server.model, tmp_path / word, 3, **config)
        body = {"lora_name": "bad", "lora_path": str(tmp_path / word)}
        assert word in await refusal(client, "/v1/load_lora_adapter", body)


async def test_sleep_and_wake(client: Client) -> None:
    prompt = some_ids(40)
    before = await client.generate(prompt, temperature=0)
    running = asyncio.create_task(client.generate(prompt, temperature=0, max_tokens=400))
    await busy(client.server.url)
    assert "requests are running" in await refusal(client, "/sleep?level=1", status=409)
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
    running = asyncio.create_task(client.generate(some_ids(40), max_tokens=400))
    await busy(client.server.url)
    await client.post("/sleep?mode=keep")
    await client.post("/wake_up?tags=weights")
    for route in ("/sleep?mode=wait", "/pause?mode=wait"):
        assert "POST /wake_up first" in await refusal(client, route, status=409)
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
        assert "wake_up?tags=weights first" in await refusal(client, route, body, 409)
    await client.post("/wake_up?tags=weights")
    assert await client.post("/weight_checker", {"action": "checksum"}) == old
    await client.post("/start_weight_update")
    assert "finish_weight_update first" in await refusal(client, "/sleep", status=409)
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
    assert "token_ids" in await client.generate([], status=400)
    assert f"from 0 to {VOCABULARY - 1}" in await client.generate([VOCABULARY], status=400)
    assert f"from 0 to {VOCABULARY - 1}" in await client.generate([-1], status=400)
    for ids in ([1.5], ["a"], [[1], [1, 2]], [True], None, [2**70]):
        assert "token_ids: must be a list of integers" in await client.generate(ids, status=400)  # type: ignore[arg-type]
    refused = [("top_p", 0.9), ("top_k", 5), ("guided", 1), ("temperature", -1), ("temperature", "hot"), ("seed", "x")]
    refused += [("temperature", 1e-320), ("logit_bias", {"3": 1e300})]
    refused += [("max_tokens", 0), ("logprobs", 2), ("stop_token_ids", "x"), ("logprob_token_ids", [VOCABULARY])]
    biases: list[Any] = [[1], {str(VOCABULARY): 1.0}, {"word": 1.0}, {"3": "much"}]
    for name, value in [*refused, *(("logit_bias", bias) for bias in biases)]:
        assert name in await client.generate([1], status=400, **{name: value})
    await client.generate([1], top_p=1.0, top_k=0)
    part = {"type": "image_url", "url": "data:image/png;base64,AAAA", "uuid": "a"}
    for body, word in (
        ({"wrong": 1}, "wrong"),
        ({"content_parts": [part]}, "reads only text"),
        ({"cache_salt": ""}, "''"),
    ):
        body = {"token_ids": [1], "sampling_params": {}, **body}
        assert word in await refusal(client, "/inference/v1/generate", body)
    assert "JSON object" in await refusal(client, "/inference/v1/generate", [1])
    for body in ({"token_ids": [1] * 1_000_000}, {"token_ids": [1], "x": "y" * (1 << 21)}):
        assert "maximum context length" in await refusal(client, "/inference/v1/generate", body)
    body = {"token_ids": [1], "sampling_params": {}, "model": {"a": 1}}
    assert "is no name" in await refusal(client, "/inference/v1/generate", body)
    await client.post("/v1/unload_lora_adapter", {"lora_name": {}}, 404)
    await client.post("/nowhere", status=404)
    await client.get("/pause", status=405)
    await client.post("/weight_checker", {"action": "reset"}, 400)
    async with client.session.post(client.server.url + "/inference/v1/generate", data=b"{") as answer:
        assert answer.status == 400


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
        said = fails(model, "--port", port)
        assert f"127.0.0.1:{port} cannot be used" in said
        assert explain([said]) == f"the address 127.0.0.1:{port} is taken; fix: server.port=0 takes a free port"
    assert "name a key by --api-key-env" in fails(model, "--port", "0", "--host", "0.0.0.0")
    assert "the variable NO_SUCH_KEY is not set" in fails(model, "--port", "0", "--api-key-env", "NO_SUCH_KEY")
    assert "cannot load the model" in fails(str(tmp_path / "none"), "--port", "0")
