"""Weights from a trainer to a server on the same GPU: CUDA IPC, and the canary in bfloat16."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.ipc_sync import IpcSync
from agentfactory.trainers.sync.server_control import ServerControl
from benchmarks import sabotage
from benchmarks.sabotage import Run
from tests.gpu.models import DEVICE, NEEDS_GPU, recipe
from tests.server_process import serve
from tests.trainers.test_sabotage import until_caught

pytestmark = NEEDS_GPU


def serve_small(model: Path, folder: Path) -> Any:
    """A server in bfloat16 on the GPU, whose cache has room for several versions of the canary's contexts."""
    section = {"engine": "embedded", "max_model_len": 160, "max_num_seqs": 64}
    return serve({"model": {"path": str(model), "dtype": "bfloat16"}, "server": section}, folder)


@pytest.fixture(scope="module")
def url(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_small(small, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    made = Accelerator()
    assert made.device.type == DEVICE
    return made


def disturb(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * parameter.abs().mean() * torch.randn_like(parameter))


@pytest.mark.parametrize("where", ["on the GPU", "offloaded"])
def test_full_weights_by_ipc(small: Path, url: str, where: str) -> None:
    """In several parts, three versions; each part is read by the server's process before the next is written. Those of
    an offloaded trainer come from the CPU into a server whose cache sleeps."""
    server = ServerControl(url)
    policy = load_policy(recipe(small, "bfloat16"), DEVICE)
    sync = IpcSync([server], buffer_bytes=2**20)
    for version in range(3):
        disturb(policy)
        state = policy.gather()
        assert all(value.is_cuda for value in state.values())
        if where == "offloaded":
            server.post("/sleep?level=1&mode=abort")
            state = {name: value.cpu() for name, value in state.items()}
            server.post("/wake_up?tags=weights")
        report = sync.push(version, policy, state)
        if where == "offloaded":
            server.post("/wake_up?tags=kv_cache")
        assert report.digest == Content(state).check({name: weight_digest(v, "fold") for name, v in state.items()})
        ids = list(range(60))
        params = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": ids, "model": report.model, "sampling_params": params}
        choice = server.post("/inference/v1/generate", body)["choices"][0]
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 8}]
        given = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        whole = torch.tensor([ids + choice["token_ids"]], device=DEVICE)
        places = torch.arange(59, 67, device=DEVICE)
        wanted, _ = policy(whole, places, whole[0, 60:])
        assert (given - wanted.detach().cpu()).abs().max() < 0.1
    held = torch.cuda.memory_allocated()
    sync.close()
    assert torch.cuda.memory_allocated() <= held


@pytest.mark.parametrize("lora", [None, "canary"])
def test_an_honest_sync(small: Path, url: str, accelerator: Accelerator, tmp_path: Path, lora: str | None) -> None:
    common = {"dtype": "bfloat16", "accelerator": accelerator}
    Run("base-1", small, tmp_path / "base", url, adapters=False, **common).push_base()
    rate = 1e-3 if lora else 1e-4
    run = Run(f"{lora or 'run'}-1", small, tmp_path, url, adapters=lora is not None, learning_rate=rate, **common)
    assert run.learner.accelerator.device.type == DEVICE
    assert until_caught(run, 12) == (-1, "")
    proven = [metrics["sync/canary_slope"] for metrics in run.metrics if metrics["sync/provable"]]
    print(f"\nnoise {run.metrics[0]['sync/canary_noise']:.2g} nats, proven {len(proven)} times, slopes {proven}")
    assert proven


def test_the_canary_catches_a_stale_replica(small: Path, url: str, accelerator: Accelerator, tmp_path: Path) -> None:
    """The server that is proven is not the one that generates."""
    with (
        serve_small(small, tmp_path) as replica,
        sabotage.sabotaged(url, sabotage.stale_replica(tmp_path, replica)) as proxy,
    ):
        run = Run("run-1", small, tmp_path, proxy, False, "bfloat16", 1e-4, accelerator)
        step, reason = until_caught(run, 40)
    assert step >= 1
    assert "it serves other weights" in reason
