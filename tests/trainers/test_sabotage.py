"""Sabotaged syncs with real servers in float32, at a learning rate of 1e-6: each is caught at a stated step.
tests/gpu/gpu_sync.py has bfloat16.

Version 0 is the first weights, step k brings version k. The trainer learns from the same rows at every step, so its
weights drift steadily. Proofs of content fail at the first version that differs from the sent one; the canary catches
the other faults once the drift is three times the noise."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentfactory.base.http.server_keys import find_key
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.full_sync import holds_full_weights
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import ForeignWeightsError
from benchmarks import sabotage
from benchmarks.sabotage import Run, make_model
from tests.conftest import embedded_server

pytestmark = pytest.mark.extended

LEARNING_RATE = 1e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sabotage") / "model")


def serve(model: Path) -> Any:
    return embedded_server(model, "--max-model-len", "160", "--max-num-seqs", "64", "--dtype", "float32")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[str]:
    with serve(model) as url:
        yield url


def until_caught(run: Run, steps: int) -> tuple[int, str]:
    """Train and sync; return the step whose sync raises an error, and the error, or (-1, "")."""
    for version in range(steps + 1):
        if error := run.step(version):
            print(f"caught at step {version}: {error}")
            return version, error
    return -1, ""


Start = Callable[..., Run]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    """`start(url, lora, learning_rate)`: a Run; `lora` is the name of an adapter's run."""

    def make(url: str, lora: str | None = None, learning_rate: float = LEARNING_RATE) -> Run:
        folder = tmp_path / (lora or "full")
        folder.mkdir()
        return Run(f"{lora or 'run'}-1", model, folder, url, lora is not None, "float32", learning_rate)

    return make


@pytest.mark.processes
def test_an_honest_sync_is_proven_at_every_step(served: str, start: Start) -> None:
    with sabotage.sabotaged(served, sabotage.nothing) as proxy:
        run = start(proxy)
        assert until_caught(run, 5) == (-1, "")
    proven = [step for step, metrics in enumerate(run.metrics) if metrics["sync/provable"]]
    assert proven == [1, 2, 3, 4, 5]
    assert [run.metrics[step]["sync/canary_slope"] for step in proven] == pytest.approx([1.0] * 5, abs=0.01)


@pytest.mark.processes
def test_a_stale_replica(served: str, model: Path, start: Start, tmp_path: Path) -> None:
    """The proven server is not the one that generates, which has the version's name but the first weights: only the
    canary can detect it."""
    with serve(model) as replica, sabotage.sabotaged(served, sabotage.stale_replica(tmp_path, replica)) as proxy:
        step, reason = until_caught(start(proxy), 60)
    assert step == 1
    assert "it serves other weights" in reason


def test_a_prefix_cache_that_is_left(served: str, start: Start) -> None:
    """The weights are right, but generation uses the first weights' cache: proofs of content cannot detect it. The gap
    between cached and fresh scores does."""
    with sabotage.sabotaged(served, sabotage.cache_left) as proxy:
        step, reason = until_caught(start(proxy), 60)
    assert step == 1
    assert "uses caches of older weights" in reason or "it serves other weights" in reason


def test_an_adapter_that_never_loads(served: str, start: Start) -> None:
    """Caught by the server's list at step 0."""
    with sabotage.sabotaged(served, sabotage.never_loaded) as proxy:
        step, reason = until_caught(start(proxy, lora="never"), 2)
    assert step == 0
    assert "does not list it in /v1/models" in reason


def test_an_old_folder_under_a_new_name(served: str, start: Start) -> None:
    """Caught by the path of the name, which carries the digest of the weights, at step 1."""
    with sabotage.sabotaged(served, sabotage.old_folder()) as proxy:
        step, reason = until_caught(start(proxy, lora="folder"), 2)
    assert step == 1
    assert "it was not loaded" in reason


def test_a_name_that_already_holds_other_weights(served: str, start: Start) -> None:
    """Another adapter has the name of version 1 on the server: caught before anything is loaded, at step 1."""
    run = start(served, lora="taken")
    other = run.other_adapter()
    ServerControl(served).post("/v1/load_lora_adapter", {"lora_name": "taken-1-v1", "lora_path": str(other)})
    step, reason = until_caught(run, 2)
    assert step == 1
    assert f"already serves an adapter called taken-1-v1, from {other}" in reason


@pytest.mark.parametrize("fault", ["old bytes", "not applied"])
def test_an_adapter_that_is_listed_and_not_used(served: str, start: Start, fault: str) -> None:
    """Name, path and digest are right, but the server computes with the first adapter or with none: only the canary can
    detect it. At step 2, since an adapter that begins at zero moves less than full weights."""
    start(served).push_base()  # other tests have replaced it
    tamper = sabotage.old_bytes() if fault == "old bytes" else sabotage.not_applied
    with sabotage.sabotaged(served, tamper) as proxy:
        step, reason = until_caught(start(proxy, lora=fault.split()[0]), 40)
    assert 1 <= step <= 40
    assert "it serves other weights" in reason


# ---- another process with the key pushes weights into a run's server


__all__ = ["model", "start"]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with serve(model) as url:
        yield url


def curl(url: str, path: str, body: object = None) -> None:
    headers = ["--header", f"Authorization: Bearer {find_key(url)}", "--header", "Content-Type: application/json"]
    command = ["curl", "--silent", "--show-error", "--fail", "--noproxy", "*", *headers]
    subprocess.run([*command, "--data", json.dumps(body or {}), url + path], check=True, capture_output=True)


def push(url: str, weights: Path, label: str) -> None:
    """Perform all steps of a sync, without a trainer."""
    curl(url, "/pause?mode=keep&clear_cache=false")
    curl(url, "/init_weight_transfer_engine")
    curl(url, "/start_weight_update")
    curl(url, "/update_weights", {"update_info": {"path": str(weights)}})
    curl(url, "/finish_weight_update", {"weight_version": label})
    curl(url, "/resume")


@pytest.fixture
def theirs(model: Path, tmp_path: Path) -> Path:
    state = load_file(model / "model.safetensors")
    save_file({name: value * 1.02 for name, value in state.items()}, tmp_path / "theirs.safetensors")
    return tmp_path / "theirs.safetensors"


def begin(start: Start, url: str, **options: object) -> Run:
    run = start(url, **options)
    assert until_caught(run, 1) == (-1, "")
    return run


@pytest.mark.processes
@pytest.mark.parametrize("label", ["other-7f3a-v1", "run-1-v1"])
def test_full_weights_of_another_process(server: str, theirs: Path, start: Start, label: str) -> None:
    """Under its own name, and under the name of our last version."""
    run = begin(start, server)
    push(server, theirs, label)
    with pytest.raises(ForeignWeightsError, match="give each run its own server") as caught:
        run.publish(2)
    print(caught.value)
    assert label in str(caught.value) or "has changed its weights since it proved version 1" in str(caught.value)


@pytest.mark.processes
def test_an_adapter_of_another_process(server: str, start: Start) -> None:
    start(server).push_base()
    run = begin(start, server, lora="mine", learning_rate=1e-3)
    other = run.other_adapter()
    curl(server, "/v1/unload_lora_adapter", {"lora_name": "mine-1-v1"})
    curl(server, "/v1/load_lora_adapter", {"lora_name": "mine-1-v1", "lora_path": str(other)})
    with pytest.raises(ForeignWeightsError, match="has changed its weights since it proved version 1"):
        run.publish(2)


@pytest.mark.processes
def test_a_server_that_comes_back_with_weights_of_another_process(server: str, theirs: Path, start: Start) -> None:
    """A client that encounters them makes the trainer restore the server, which does not hide the fault."""
    run = begin(start, server)
    push(server, theirs, "other-7f3a-v1")
    with pytest.raises(ForeignWeightsError, match=r"serves version 'other-7f3a-v1', but 'run-1-v1' was pushed"):
        run.sync.restore(server)
    push(server, theirs, "run-1-v0")
    run.sync.restore(server)
    policy = run.learner.policy
    assert holds_full_weights(ServerControl(server), "run-1-v1", Content(policy.gather()))
