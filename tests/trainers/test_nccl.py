"""The nccl backend's protocol, over gloo against a receiving process, and sharded weights that are sent while they are
gathered. NCCL itself is untested here: it needs GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agentfactory.rollout.inference.sglang.front import NCCL_VARIABLES
from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content, served_checksums
from agentfactory.trainers.sync.nccl_sync import NcclSync, group_for, packed
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.forked import start_engine, start_ranks
from tests.trainers.test_sharding import save_network

pytestmark = pytest.mark.processes

RECEIVER = Path(__file__).with_name("gloo_receiver.py")


class GlooGroup:
    """The trainer's end, rank 0."""

    device = torch.device("cpu")

    def __init__(self, address: str, port: int, world_size: int) -> None:
        wait = timedelta(seconds=60)
        store = dist.TCPStore(address, port, world_size, is_master=True, timeout=wait)
        self.group = dist.ProcessGroupGloo(store, 0, world_size, wait)

    def broadcast(self, buffer: Tensor) -> None:
        self.group.broadcast(buffer, 0).wait()

    def close(self) -> None:
        self.group.shutdown()


@contextmanager
def receiver(policy: Policy, folder: Path, fault: str = "") -> Iterator[ServerControl]:
    """Run a receiving process with other weights than the policy's."""
    file = folder / "other.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in policy.gather().items()}, file)
    with receiving(file, fault) as server:
        yield server


@contextmanager
def receiving(file: Path, fault: str = "") -> Iterator[ServerControl]:
    """Run a receiving process with the weights of a file."""
    command = [sys.executable, str(RECEIVER), str(file), fault]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield ServerControl(process.stdout.readline().strip(), timeout_seconds=60)
        finally:
            process.kill()


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_weights_arrive_in_every_server(policy: Policy, tmp_path: Path, count: int) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(receiver(policy, tmp_path)) for _ in range(count)]
        sync = NcclSync(servers, open_group=GlooGroup, buffer_bytes=20_000)
        state = policy.gather()
        for version in (0, 1):
            report = sync.push(version, policy, state)
            assert (report.version, report.label, report.model) == (version, str(version), "policy")
            assert report.bytes == sum(value.nbytes for value in state.values())
            with torch.no_grad():
                next(policy.parameters()).add_(1.0)
        buffers = sum(1 for _ in packed(state.items(), 20_000))
        assert buffers > 2
        for server in servers:
            calls = server.get("/calls")["calls"]
            order = [call.partition("?")[0] for call in calls if not call.startswith("buffer")]
            update = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
            update += ["/reset_prefix_cache", "/resume", "/weight_checker"]
            # the first proof needs the server's weight layout before the weights are sent
            assert order == ["/init_weight_transfer_engine", "/weight_checker", *update, *update]
            assert len(calls) - len(order) == 2 * buffers
        assert sync.restore(servers[0].url) == report
        sync.close()


def test_a_server_that_refuses_stops_the_run_at_once(policy: Policy, tmp_path: Path) -> None:
    """Although the broadcast still waits for it."""
    with receiver(policy, tmp_path, "refuses") as server:
        sync = NcclSync([server], open_group=GlooGroup, buffer_bytes=20_000)
        with pytest.raises(SyncError, match=r"/update_weights answered 400: .*out of memory"):
            sync.push(0, policy, policy.gather())


def test_packing_cuts_after_the_weight_that_goes_beyond_the_buffer() -> None:
    """vLLM's rule: a buffer is sent once it exceeds its size, so a large weight is sent whole."""
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(100), "d": torch.ones(1, dtype=torch.bfloat16)}
    assert [buffer.numel() for buffer in packed(state.items(), 32)] == [16 + 16 + 400, 2]
    assert [buffer.numel() for buffer in packed(state.items(), 31)] == [32, 400, 2]
    assert [buffer.numel() for buffer in packed(state.items(), 10_000)] == [434]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    """vLLM names no kind of group; SGLang on a GPU joins NCCL's."""
    fault = r"sync\.backend: nccl: the trainer has no CUDA device; use sync\.backend: file"
    for kind in ({}, {"process_group": "nccl"}):
        with pytest.raises(SyncError, match=fault):
            group_for([{"world_size": 1, **kind}])


def test_nccl_that_cannot_join_sglangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    answer = {"world_size": 1, "process_group": "nccl", "variables": NCCL_VARIABLES, "nccl": "2.28.9"}
    for name, value in NCCL_VARIABLES.items():
        monkeypatch.delenv(name, raising=False)
        with pytest.raises(SyncError, match=rf"SGLang sets {name}=0, and the trainer has None; export {name}=0"):
            group_for([answer])
        monkeypatch.setenv(name, value)
    assert group_for([answer])
    for version, told in (("2.30.4", "has NCCL 2.30.4"), (None, "was not started here, so that its version")):
        with pytest.raises(
            SyncError, match=rf"the trainer has NCCL 2.28.9, and SGLang {told}.*; use sync.backend: file"
        ):
            group_for([{**answer, "nccl": version}])


# ---- no process holds all weights


@pytest.mark.extended
def test_three_ranks_send_what_none_of_them_holds(tmp_path: Path) -> None:
    # sent with half of the file's bytes
    size = save_network(tmp_path / "model", 24, 256) / 2
    network = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    state = {name: value for name, value in network.state_dict().items() if name != "lm_head.weight"}
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path / "zeros.safetensors")
    flags = ("--dtype", "bfloat16", "--max-num-seqs", "1", "--max-model-len", "64")
    engine, url = start_engine(tmp_path / "model", *flags, log=tmp_path / "engine.log")
    recipe: dict[str, Any] = {"model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"}}
    recipe["train"] = {"steps": 1, "strategy": "fsdp2", "processes": 3}
    log = tmp_path / "ranks.log"
    try:
        with receiving(tmp_path / "zeros.safetensors") as receiver:
            arguments = (json.dumps(recipe), receiver.url, url, str(tmp_path))
            ranks = start_ranks("tests.trainers.launched_sending", *arguments, log=log, strategy="fsdp2", count=3)
            assert [rank.wait() for rank in ranks] == [0, 0, 0], log.read_text()
            received = served_checksums(receiver)
        served = served_checksums(ServerControl(url))
    finally:
        engine.kill()
        engine.wait()
    found = json.loads((tmp_path / "found.json").read_text())
    whole = load_file(tmp_path / "whole.safetensors")
    assert whole.keys() == state.keys()
    assert found["begun"] == list(network.state_dict())[:2]
    Content(whole).check(received)
    Content(whole).check(served)
    largest = max(value.nbytes for value in whole.values()) / 1e6
    print(f"{size:.0f} MB of weights, the largest {largest:.0f} MB; {found}")
    for name in ("nccl", "file"):
        for version in range(3):
            assert found[f"{name} {version}"]["bytes"] >= 1e6 * size
            assert found[f"{name} {version}"]["peak"] < 6 * largest < 0.6 * size


def test_a_weight_is_held_until_the_layouts_that_need_it_are_digested() -> None:
    stem = "model.layers.0.self_attn."
    state = {f"{stem}{part}_proj.weight": torch.randn(4, 8) for part in "qkv"}
    state["model.norm.weight"] = torch.randn(8)
    served = {
        f"{stem}qkv_proj.weight": weight_digest(torch.cat(list(state.values())[:3])),
        "model.norm.weight": weight_digest(state["model.norm.weight"]),
    }
    weights = Weights(state.items())
    content = Content(weights.meta, {"http://server": served}, keep=False)
    read = dict(content.passing(weights.stream()))
    assert read.keys() == state.keys()
    content.check(served)
    assert all(value.is_meta for value in content.state.values())
    # a layout that no server had before can no longer be computed
    apart = {name: weight_digest(value) for name, value in state.items()}
    with pytest.raises(Exception, match=r"in another layout than before the update: .* resume the run"):
        content.check(apart)
    wrong = served | {"model.norm.weight": weight_digest(torch.zeros(8))}
    with pytest.raises(Exception, match=r"model\.norm\.weight differs from the trainer's"):
        content.check(wrong)
