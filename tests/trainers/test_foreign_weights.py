"""Another process with the key pushes weights into a run's server: the run's next sync detects it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agentfactory.base.http.server_keys import find_key
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.full_sync import holds_full_weights
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import ForeignWeightsError
from benchmarks.sabotage import Run
from tests.trainers.test_sabotage import Start, model, serve, start, until_caught

__all__ = ["model", "start"]
pytestmark = [pytest.mark.processes, pytest.mark.extended]


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


@pytest.mark.parametrize("label", ["other-7f3a-v1", "run-1-v1"])
def test_full_weights_of_another_process(server: str, theirs: Path, start: Start, label: str) -> None:
    """Under its own name, and under the name of our last version."""
    run = begin(start, server)
    push(server, theirs, label)
    with pytest.raises(ForeignWeightsError, match="give each run its own server") as caught:
        run.publish(2)
    print(caught.value)
    assert label in str(caught.value) or "has changed its weights since it proved version 1" in str(caught.value)


def test_an_adapter_of_another_process(server: str, start: Start) -> None:
    start(server).push_base()
    run = begin(start, server, lora="mine", learning_rate=1e-3)
    other = run.other_adapter()
    curl(server, "/v1/unload_lora_adapter", {"lora_name": "mine-1-v1"})
    curl(server, "/v1/load_lora_adapter", {"lora_name": "mine-1-v1", "lora_path": str(other)})
    with pytest.raises(ForeignWeightsError, match="has changed its weights since it proved version 1"):
        run.publish(2)


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
