"""The embedded engine's features beyond `test_server_contract.py`, in real processes over HTTP."""

import asyncio
import base64
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import aiohttp
import peft
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from agentfactory.rollout.inference.http_transport import authorization
from tests.chat_tokenizers import make_tokenizer
from tests.forked import start_engine
from tests.rollout.test_server_contract import (
    Client,
    Served,
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "12")
    process, url = start_engine(model, *flags, log=model.with_suffix(".log"))
    yield Served(url, model)
    assert process.kill(signal.SIGTERM) == 0


async def refusal(client: Client, path: str, body: Any = None, status: int = 400) -> str:
    """The message of a refused request."""
    return (await client.post(path, body, status))["error"]["message"]


@pytest_asyncio.fixture
async def client(server: Served) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers=authorization(server.url, None)) as session:
        client = Client(server, session)
        yield client
        # the next test starts with the initial weights and an empty cache, whatever this one did
        await client.post("/wake_up")
        await client.post("/resume")
        await client.update(client.server.model / "model.safetensors", "0")
        assert (await client.post("/reset_prefix_cache"))["success"]


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


async def test_error_answers(client: Client) -> None:
    assert await client.generate([1], model="other", status=404) == "The model `other` does not exist."
    long = await client.generate([1] * MAX_MODEL_LEN, status=400)
    assert long.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
    assert "token_ids" in await client.generate([], status=400)
    assert f"from 0 to {VOCABULARY - 1}" in await client.generate([VOCABULARY], status=400)
    for ids in ([1.5], [[1], [1, 2]], [True], None, [2**70]):
        assert "token_ids: must be a list of integers" in await client.generate(ids, status=400)  # type: ignore[arg-type]
    bad = [
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 0.1),
        ("guided", 1),
        ("temperature", "hot"),
        ("temperature", 1e-320),
        ("max_tokens", 0),
    ]
    bad += [("logprob_token_ids", [VOCABULARY]), ("logit_bias", {str(VOCABULARY): 1.0}), ("logit_bias", {"3": 1e300})]
    for name, value in bad:
        assert name in await client.generate([1], status=400, **{name: value})
    part = {"type": "image_url", "url": "data:image/png;base64,AAAA", "uuid": "a"}
    body = {"token_ids": [1], "sampling_params": {}, "content_parts": [part]}
    assert "reads only text" in await refusal(client, "/inference/v1/generate", body)
    for body in ({"token_ids": [1] * 1_000_000}, {"token_ids": [1], "x": "y" * (1 << 21)}):
        assert "maximum context length" in await refusal(client, "/inference/v1/generate", body)
    async with client.session.post(client.server.url + "/inference/v1/generate", data=b"{") as answer:
        assert answer.status == 400
