"""Weight sync with the embedded engine, over HTTP: new weights arrive, also of a vision tower, and missing weights are
detected."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from agentfactory.base.files.disk import DiskError
from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.checkpoints.checkpoint_folder import digest
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import Canary, canary_rows
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import WeightSync, served_models
from tests.conftest import embedded_server
from tests.forked import reserved_port
from tests.server_process import serve
from tests.trainers.conftest import Make
from tests.trainers.scored import disturb
from tests.vision_models import KINDS, make_vision_model
from tests.vision_training import SeeingRun
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

VOCABULARY = 64
PROMPT = [5, 9, 12, 3, 7]


def sampled(server: ServerControl, model: str) -> tuple[list[int], list[float], list[str]]:
    """Return eight greedy tokens, their log-probabilities, and the versions that sampled them."""
    params = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "model": model}
    choice: dict[str, Any] = server.post("/inference/v1/generate", body)["choices"][0]
    logprobs = [content["logprob"] for content in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, [span["version"] for span in choice["weight_versions"]]


def scored(policy: Policy, tokens: list[int]) -> list[float]:
    ids = torch.tensor([PROMPT + tokens])
    sources = torch.arange(len(PROMPT) - 1, ids.shape[1] - 1)
    with torch.no_grad():
        return policy(ids, sources, ids[0, sources + 1])[0].tolist()


def test_full_weights_arrive(make_recipe: Make, server: ServerControl, tmp_path: Path) -> None:
    policy = load_policy(make_recipe())
    sync = FileSync([server], tmp_path)
    for version in (0, 1, 2):
        report = sync.push(version, policy, policy.gather())
        assert (report.version, report.label, report.model) == (version, str(version), "policy")
        assert report.bytes > sum(parameter.numel() * 4 for parameter in policy.parameters())
        tokens, logprobs, versions = sampled(server, report.model)
        assert versions == [str(version)]
        assert logprobs == pytest.approx(scored(policy, tokens), abs=1e-4)
        # the last version's file stays, for a restarted server; the previous one is deleted meanwhile
        wait_for(lambda name=str(version): [child.name for child in tmp_path.iterdir()] == [name])
        disturb(policy, version)
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_adapters_arrive_and_old_ones_go(make_recipe: Make, server: ServerControl, tmp_path: Path) -> None:
    full = load_policy(make_recipe())
    FileSync([server], tmp_path / "file").push(0, full, full.gather())
    policy = load_policy(make_recipe(lora={"rank": 2}))
    sync = LoraSync([server], tmp_path / "lora", "quick-4-v", keep=2)
    for version in (0, 1, 2):
        report = sync.push(version, policy, policy.gather())
        assert report.model == report.label == f"quick-4-v{version}"
        assert report.bytes < 40_000
        tokens, logprobs, versions = sampled(server, report.model)
        assert versions == [report.label]
        assert logprobs == pytest.approx(scored(policy, tokens), abs=1e-4)
        disturb(policy, version)
    # a folder's name contains the digest of its weights, so that no path is used twice
    folders = sorted((tmp_path / "lora").iterdir())
    digests = [digest(folder / "adapter_model.safetensors")[:16] for folder in folders]
    assert [folder.name for folder in folders] == [f"quick-4-v1-{digests[0]}", f"quick-4-v2-{digests[1]}"]
    assert served_models(server) == ["policy", "quick-4-v1", "quick-4-v2"]
    # a second push of the same version is another adapter
    assert sync.push(2, policy, policy.gather()).model == "quick-4-v2-2"
    assert served_models(server) == ["policy", "quick-4-v2", "quick-4-v2-2"]
    # the next run needs the room; the files stay
    sync.close()
    assert served_models(server) == ["policy"]
    assert len(list((tmp_path / "lora").iterdir())) == 2


def test_nobody_else_can_write_what_a_server_reads(make_recipe: Make, server: ServerControl, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        full, adapted = load_policy(make_recipe()), load_policy(make_recipe(lora={"rank": 2}))
        file = FileSync([server], tmp_path / "file")
        file.push(0, full, full.gather())
        adapter = LoraSync([server], tmp_path / "lora", "modes-", keep=2).push(0, adapted, adapted.gather())
    finally:
        os.umask(before)
    server.post("/v1/unload_lora_adapter", {"lora_name": adapter.model})
    written = [path for kind in ("file", "lora") for path in (tmp_path / kind).glob("*/**")]
    written += [path for path in tmp_path.glob("*/*/*") if path.is_file()]
    assert len(written) >= 5
    assert not [path for path in written if path.stat().st_mode & 0o022]


def test_a_server_chooses_the_digest() -> None:
    """On a GPU, and in vLLM's environment, it differs from a CPU's."""
    state = {"model.norm.weight": torch.randn(3), "lm_head.weight": torch.randn(64, 3)}
    for function in ("xxh3", "fold"):
        right = {name: weight_digest(value, function) for name, value in state.items()}
        Content(state).check(right)
        with pytest.raises(SyncError, match=r"model\.norm\.weight differs from the trainer's"):
            Content(state).check(right | {"model.norm.weight": weight_digest(torch.zeros(3), function)})
    with pytest.raises(SyncError, match="checksums use 'crc', and this release knows xxh3 and fold"):
        Content(state).check(right | {"model.norm.weight": "crc:float32:3:00"})


def test_the_content_of_each_replica_is_proven() -> None:
    state = {"model.norm.weight": torch.randn(3), "lm_head.weight": torch.randn(64, 3)}
    right = {f"dp0:pp0:pcp0:tp0:{name}": weight_digest(value) for name, value in state.items()}
    other = {key.replace("dp0", "dp1"): checksum for key, checksum in right.items()}
    Content(state).check(right | other, replicas=2)
    stale = {**other, "dp1:pp0:pcp0:tp0:model.norm.weight": weight_digest(torch.zeros(3))}
    with pytest.raises(SyncError, match=r"dp1:pp0:pcp0:tp0:model\.norm\.weight differs from the trainer's"):
        Content(state).check(right | stale, replicas=2)
    with pytest.raises(SyncError, match="has 2 replicas, but returned checksums of 1"):
        Content(state).check(right, replicas=2)
    del other["dp1:pp0:pcp0:tp0:model.norm.weight"]
    with pytest.raises(SyncError, match=r"no checksum for model\.norm\.weight"):
        Content(state).check(right | other, replicas=2)


def test_nothing_is_left_of_a_version_that_is_lost(make_recipe: Make, server: ServerControl, tmp_path: Path) -> None:
    policy = load_policy(make_recipe())
    sync = FileSync([server], tmp_path)
    full = OSError(errno.ENOSPC, "")
    failing = patch("agentfactory.trainers.sync.file_sync.save_file", side_effect=full)
    with failing, pytest.raises(DiskError, match=r"model-00000\.safetensors cannot be written: No space left"):
        sync.push(0, policy, policy.gather())
    assert list(tmp_path.iterdir()) == []
    sync.push(0, policy, policy.gather())
    # disk space is freed
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(SyncError, match=r"cannot get version 0: .* was removed"):
        sync.restore(server.url)
    assert sync.push(1, policy, policy.gather()).version == 1
    with patch.object(FileSync, "_update", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        sync.push(2, policy, policy.gather())
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_refuses_or_is_gone_stops_the_run(server: ServerControl) -> None:
    with pytest.raises(SyncError, match=r"/update_weights answered 400: .*start_weight_update"):
        server.post("/update_weights", {"update_info": {"path": "nowhere"}})
    with pytest.raises(ValueError, match=r"server\.api_key_env: the variable NO_SUCH_KEY is not set; fix: export it"):
        ServerControl(server.url, "NO_SUCH_KEY")
    with pytest.raises(ValueError, match=r"server\.url: 'localhost:8000'"):
        ServerControl("localhost:8000")


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_server_that_is_started_again_gets_the_last_version_back(
    make_recipe: Make, model_folder: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """The server is killed and another one is started at its port; a second server continues meanwhile."""
    policy = load_policy(make_recipe(lora))
    rows = canary_rows(range(VOCABULARY), longest=63)
    flags = ["--max-model-len", "64"]
    with embedded_server(model_folder, *flags) as staying:
        port = reserved_port()
        servers = [ServerControl(staying), ServerControl(f"http://127.0.0.1:{port}")]
        with embedded_server(model_folder, *flags, "--port", str(port)):
            sync: WeightSync = LoraSync(servers, tmp_path, "run-1-v", 2) if lora else FileSync(servers, tmp_path)
            canary = Canary(servers, rows, "float32")
            canary.prove(sync.push(0, policy, policy.gather()), canary.trainer_scores(policy))
            disturb(policy, 1)
            canary.prove(sync.push(1, policy, policy.gather()), canary.trainer_scores(policy))
        # the other server continues alone
        disturb(policy, 2)
        metrics = canary.prove(sync.push(2, policy, policy.gather()), canary.trainer_scores(policy))
        assert metrics["sync/canary_slope"] == pytest.approx(1.0, abs=1e-3)
        with pytest.raises(ServerGoneError):
            sync.restore(servers[1].url)
        with embedded_server(model_folder, *flags, "--port", str(port)):
            before = sampled(servers[1], "policy")
            report = sync.restore(servers[1].url)
            canary.prove(report, canary.trainer_scores(policy))
            canary.prove_again(report, servers[1].url)
            assert report.version == 2
            assert sampled(servers[1], report.model) == sampled(servers[0], report.model) != before
            # a server that has the version is left unchanged
            with patch.object(ServerControl, "post", autospec=True, side_effect=ServerControl.post) as posts:
                sync.restore(servers[1].url)
            assert {call.args[1] for call in posts.call_args_list} <= {"/weight_checker"}
    with pytest.raises(ServerGoneError):
        sync.push(3, policy, policy.gather())


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_sees_with_the_trained_tower(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An image that the server has cached is encoded again."""
    model = {"path": str(make_vision_model(tmp_path / "model", kind)), "dtype": "float32"}
    with serve({"model": model, "server": {"engine": "embedded", "max_model_len": 512}}, tmp_path) as url:
        SeeingRun(tmp_path, url).check(caplog)
