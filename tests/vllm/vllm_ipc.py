"""The ipc backend and vLLM itself: its own engine reads what is sent, but for the CUDA calls."""

import base64
import json
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch

from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.ipc_sync import Buffer, parts, update_info
from tests.server_process import VLLM_PYTHON

WORKER = Path(__file__).with_name("ipc_worker.py")


def exchange(worker: "subprocess.Popen[str]", message: object) -> object:
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
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": allowed, "VLLM_LOGGING_LEVEL": "ERROR"}
    command, pipe = [VLLM_PYTHON, str(WORKER)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as worker:
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
            assert digests.keys() == state.keys()
            Content(state).check(digests)
    buffer.close()
