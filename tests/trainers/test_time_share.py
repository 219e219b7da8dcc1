"""Alternating use of one device: the order of requests to the server, and their failures.

A proxy between trainer and embedded engine records requests, and imitates faults observed in real servers."""

import asyncio
import http.client
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoTokenizer

from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.loop import time_share
from agentfactory.trainers.loop.rl import Services, train_rl
from agentfactory.trainers.loop.stopping import Stop
from agentfactory.trainers.loop.time_share import TimeShare
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.proven_push import RetryingSync
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import WeightSync
from agentfactory.trainers.update.offload import Offload
from tests.forked import start_engine
from tests.server_process import busy
from tests.trainers.conftest import Make, on_cpu
from tests.trainers.test_rl import LiveSource, unlisted
from tests.waiting import until

GENERATE = "/inference/v1/generate"


class Recorder:
    """A proxy on a free loopback port. It does not record GETs, except for /is_sleeping.

    `answers` replace the server's responses, by path. If it `loses_adapters`, they are still listed, but requests for
    them get the base model (vLLM #53888)."""

    def __init__(self, upstream: str, api_key_env: str | None = None) -> None:
        self.api_key_env = api_key_env
        self.calls: list[str] = []
        self.bodies: list[tuple[bytes, bytes]] = []
        """Bodies of the requests for turns, and of their responses."""
        self.answers: dict[str, tuple[int, str]] = {}
        self.loses_adapters = False
        self.upstream = upstream
        self.noting = threading.Lock()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            do_GET = do_POST = lambda request: recorder.forward(request)
            log_message = lambda *_: None  # noqa: E731

        # the default of 5 waiting connections resets some of a busy machine's
        proxy = type("Proxy", (ThreadingHTTPServer,), {"request_queue_size": 128})
        self.server = proxy(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = request.path.split("?")[0]
        if request.command == "POST" or path == "/is_sleeping":
            self.note(path, request.path, json.loads(body or b"{}"))
        if path in self.answers:
            status, text = self.answers[path]
            answer = text.encode()
        else:
            sent = self.robbed(body) if path == GENERATE else body
            connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=60)
            headers = {"Content-Type": "application/json", **authorization(self.upstream, self.api_key_env)}
            connection.request(request.command, request.path, sent, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
            connection.close()
        if path == GENERATE:
            self.bodies.append((body, answer))
        request.send_response(status)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    def note(self, path: str, full: str, body: dict[str, Any]) -> None:
        call = full
        if path == GENERATE:
            call = "canary" if "logprob_token_ids" in body["sampling_params"] else "turn"
        elif path.endswith("lora_adapter"):
            call = f"{path.split('/')[-1].split('_')[0]} {body['lora_name']}"
        with self.noting:
            if call not in ("canary", "turn") or self.calls[-1:] != [call]:
                self.calls.append(call)

    def robbed(self, body: bytes) -> bytes:
        """Rewrite a request for a lost adapter as the server would handle it."""
        return json.dumps({**json.loads(body), "model": "policy"}).encode() if self.loses_adapters else body


class Chains(LiveSource):
    """Chains that label an adapter's tokens with its name, as real chains do: a server may report the base's
    version."""

    def _group(self, number: int) -> Group:
        group = super()._group(number)
        if self.model != "policy":
            for row in (row for chain in group.trajectories for row in chain.rows):
                row.versions = [replace(span, version=self.model) for span in row.versions]
        return group


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--dtype", "float32", "--max-model-len", "1024")
    process, url = start_engine(model_folder, *flags, log=tmp_path_factory.mktemp("engine") / "engine.log")
    yield url
    process.kill(signal.SIGTERM)


@contextmanager
def recording(upstream: str, api_key_env: str | None = None) -> Iterator[Recorder]:
    """Run a proxy in front of a server; afterwards, wake the server and remove its adapters."""
    made = Recorder(upstream, api_key_env)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()
        server = ServerControl(upstream, api_key_env)
        server.post("/wake_up")
        for card in server.get("/v1/models")["data"][1:]:
            server.post("/v1/unload_lora_adapter", {"lora_name": card["id"]})


@pytest.fixture
def recorder(engine: str) -> Iterator[Recorder]:
    with recording(engine) as made:
        yield made


@pytest.fixture
def train(make_recipe: Make, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    return lambda: take_turns(make_recipe, {"rank": 4}, recorder, tmp_path, monkeypatch)


def take_turns(
    make_recipe: Make, lora: dict[str, Any] | None, recorder: Recorder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Run two steps through the proxy, which also records the trainer's moves; return the log of each version."""
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(Offload, name, noted(recorder, getattr(Offload, name), f"trainer: {name}"))
    monkeypatch.setattr(TimeShare, "share", noted(recorder, TimeShare.share, "trainer: made"))
    server, accelerator = ServerControl(recorder.url), on_cpu()
    recipe = make_recipe(lora, steps=2, batch_size=1, learning_rate=1e-2)
    sync: WeightSync = LoraSync([server], folder, "run-1-v", keep=2) if lora else FileSync([server], folder)
    canary = Canary([server], canary_rows(range(60), longest=63), "float32")
    turns = TimeShare(server, accelerator.device, retry_seconds=10.0, moves=True)
    logged: list[dict[str, Any]] = []
    recorder.calls.clear()
    saved, retrying = folder / "checkpoints", RetryingSync(turns.waking(sync), canary, retry_seconds=10.0)
    checkpoints = Checkpoints(saved, AutoTokenizer.from_pretrained(recipe.model.path), recipe.train)
    services = {"source": Chains(server, 1.0, saved), "sync": retrying, "canary": canary, "turns": turns}
    train_rl(recipe, accelerator, checkpoints, Services(logged.append, **services))
    return [entry for entry in logged if "sync/bytes" in entry]


def noted(recorder: Recorder, method: Callable[..., None], words: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        method(*arguments)
        recorder.calls.append(words)

    return call


SLEEP = ["/sleep?level=1&mode=abort", "/is_sleeping"]
CACHE = ["/wake_up?tags=kv_cache", "/is_sleeping", "canary"]
UPDATE = [
    *("/wake_up?tags=weights", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/reset_prefix_cache?reset_running_requests=true", "/weight_checker", *CACHE),
]


def check_metrics(logged: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in logged] == [0, 1, 2]
    for entry in logged:
        assert min(entry[f"seconds/{name}"] for name in ("sleep", "bring_in", "park", "wake")) >= 0
        assert entry["seconds/wake"] < entry["seconds/sync"]
        assert unlisted(set(entry)) == set()
    for entry in logged[1:]:
        assert 0 < entry["mismatch/max"] < 1e-4
        assert entry["sync/canary_slope"] == pytest.approx(1.0, abs=1e-3)


def test_a_lost_adapter_is_caught(train: Callable[[], Any], recorder: Recorder) -> None:
    """It is listed with the path that was sent, but the base model computes."""
    recorder.loses_adapters = True
    with pytest.raises(SyncError, match=r"version 1 \(run-1-v1\): .* moved by 0.* it serves other weights"):
        train()
    # the first adapter changes nothing
    assert recorder.calls.count("turn") == 1


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/sleep", (404, "no such route"), r"does not sleep: .*answered 404: no such route; .*--enable-sleep-mode"),
        ("/sleep", (200, "{}"), r"accepted /sleep, but reports that it is awake; .*placement\.mode=split"),
        ("/wake_up", (500, "no room"), r"does not wake up: .*500: no room; .*previous amount of memory.*--resume"),
        ("/wake_up", (200, '{"status": "awake"}'), r"accepted /wake_up, but reports that it is asleep"),
    ],
)
def test_a_refusal_is_told(recorder: Recorder, path: str, answer: tuple[int, str], words: str) -> None:
    recorder.answers[path] = answer
    server = ServerControl(recorder.url)

    def sleep_and_wake() -> None:
        server.sleep()
        server.wake_up("weights")
        server.wake_up("kv_cache")

    with pytest.raises(SyncError, match=rf"^placement\.mode: time_share: .*{words}"):
        sleep_and_wake()
    assert server.asleep == (path == "/wake_up")


def test_a_refusal_stops_the_run(train: Callable[[], Any], recorder: Recorder) -> None:
    """Neither the canary nor a chain uses a server with unproven weights."""
    recorder.answers["/wake_up"] = (500, "out of memory")
    with pytest.raises(SyncError):
        train()
    assert not {"canary", "turn"} & set(recorder.calls)
    assert "trainer: made" in recorder.calls


def test_a_run_that_is_told_to_stop_waits_for_no_server() -> None:
    stop = Stop()
    stop.heard = signal.SIGTERM
    turns = TimeShare(ServerControl("http://127.0.0.1:9"), torch.device("cpu"), retry_seconds=600.0, stop=stop)
    with pytest.raises(ServerGoneError, match=r"127\.0\.0\.1:9/sleep"), turns.training():
        pytest.fail("the trainer's turn")


def test_a_server_that_frees_nothing_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * 2**30, 10 * 2**30 + 5]
    monkeypatch.setattr(time_share, "free_memory", lambda device: free.pop(0))
    turns = TimeShare(ServerControl(recorder.url), torch.device("cpu"), retry_seconds=10.0)
    with pytest.raises(SyncError, match="freed only 5 bytes of cpu: start it on the trainer's GPU"), turns.training():
        pytest.fail("the trainer's turn")


async def cut_by_sleep(recorder: Recorder, tokens: int) -> None:
    """Request a turn of `tokens` tokens through the proxy; sleep interrupts it, and the client retries."""
    server = ServerControl(recorder.url)
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    async with InferenceClient(recorder.url, retry_seconds=2.0) as client:
        asking = asyncio.create_task(client.generate([5, 9, 12], "policy", sampling))
        await busy(recorder.upstream, api_key_env=recorder.api_key_env)
        await asyncio.to_thread(server.sleep)
        await until(lambda: len(recorder.calls) > 2)
        await asyncio.sleep(2.5)  # longer than an awake server may take for a token
        assert recorder.calls[:2] == ["turn", SLEEP[0]]
        assert set(recorder.calls[2:]) == {"/is_sleeping"}, "a sleeping server gets no turn"
        assert not asking.done()
        for part in ("weights", "kv_cache"):
            await asyncio.to_thread(server.wake_up, part)
        again = await asking
        whole = await client.generate([5, 9, 12], "policy", sampling)
    # on a busy machine, later responses may be late and requested again
    (first, cut), (second, _), *_ = recorder.bodies
    assert json.loads(cut)["choices"][0]["finish_reason"] == "abort"
    assert 0 < len(json.loads(cut)["choices"][0]["token_ids"]) < tokens
    assert first == second
    assert again.token_ids == whole.token_ids
    assert len(again.token_ids) == tokens
