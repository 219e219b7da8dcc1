"""The ipc backend and vLLM itself: its own engine reads what is sent, but for the CUDA calls; its server on a CPU."""

import base64
import json
import os
import pickle
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.ipc_sync import Buffer, IpcSync, parts, update_info
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.rollout.test_server_contract import make_model
from tests.server_process import VLLM_PYTHON, serve

WORKER = Path(__file__).with_name("ipc_worker.py")
KEY = "s3cret"


def start_worker(allowed: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": allowed, "VLLM_LOGGING_LEVEL": "ERROR"}
    assert VLLM_PYTHON is not None
    command = [VLLM_PYTHON, str(WORKER)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def exchange(worker: "subprocess.Popen[str]", message: object) -> object:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(message) + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


@pytest.mark.parametrize("allowed", ["1", "0"])
def test_vllms_engine_reads_what_is_sent(allowed: str) -> None:
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(30, 7).to(torch.bfloat16) for n in range(5)}
    state |= {"scale": torch.randn(9), "scalar": torch.tensor(3.0)}
    capacity = 1000
    buffer = Buffer(capacity, torch.device("cpu"))
    # a GPU's handle has fifteen entries; the engine puts its own device's number into the seventh
    handle = (buffer.handles["cpu"][0], capacity, None, None, None, None, 5)
    pickled = base64.b64encode(pickle.dumps({"GPU-of-this-test": handle})).decode()
    with start_worker(allowed) as worker:
        exchange(worker, {"packed": True})
        sent = [*parts(state, capacity)]
        assert len(sent) > 2
        for part in sent:
            buffer.fill(part)
            answer = exchange(worker, {**update_info(part, buffer), "ipc_handles_pickled": pickled})
            if allowed == "0":
                assert "VLLM_ALLOW_INSECURE_SERIALIZATION" in str(answer)
                worker.kill()
                break
            assert answer == "loaded"
        else:
            digests = exchange(worker, None)
            assert isinstance(digests, dict)
            assert digests.keys() == state.keys()
            Content(state).check(digests)
    buffer.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real server that was started for ipc, behind a key."""
    folder = tmp_path_factory.mktemp("ipc")
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 512, "api_key_env": "IPC_TEST_KEY"}
    model = {"path": str(make_model(folder / "model", tied=True)), "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPC_TEST_KEY", KEY)
        with serve({"model": model, "server": server}, folder, "ipc") as url:
            yield url, folder / "model"


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/collective_rpc", "/v1/models", "/inference/v1/generate"]
)
def test_no_route_of_vllm_is_open(server: tuple[str, Path], path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server[0] + path, data=b"{}"))
    assert refused.value.code == 401


def test_on_a_cpu_vllm_is_refused_and_gets_as_far_as_cuda(server: tuple[str, Path]) -> None:
    url, model = server
    control = ServerControl(url, "IPC_TEST_KEY")
    with pytest.raises(SyncError, match=r"reads weights only from GPU memory.* use sync\.backend: file"):
        IpcSync([control])
    state = load_file(model / "model.safetensors")
    buffer = Buffer(sum(value.nbytes for value in state.values()), torch.device("cpu"))
    part = list(state.items())
    buffer.fill(part)
    control.post("/pause?mode=keep&clear_cache=false")
    control.post("/start_weight_update")
    with pytest.raises(SyncError) as refused:
        control.post("/update_weights", {"update_info": update_info(part, buffer)})
    # it has unpickled the handle, and would open it
    assert "Refusing" not in str(refused.value)
    assert "CUDA" in str(refused.value)
    buffer.close()
