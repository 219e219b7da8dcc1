"""Networks that see on real vLLM, trained with their towers, synced and proven; an image that the server has seen
before is seen anew after each update, and with the cached features of older weights the proof fails."""

from collections.abc import Iterator

import pytest
import torch

from agentfactory.trainers.networks.vision_tower import tower_of
from agentfactory.trainers.sync.full_sync import FORGET_FEATURES
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.server_process import VLLM_PYTHON, serve
from tests.vision_families import FAMILIES, make_family, params_of
from tests.vision_models import KINDS, make_vision_model
from tests.vision_training import STEPS, SeeingRun


@pytest.fixture(
    scope="module",
    params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long), *params_of(FAMILIES, pytest.mark.long)],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingRun]:
    folder = tmp_path_factory.mktemp(request.param)
    make = make_vision_model if request.param in KINDS else make_family
    model = {"path": str(make(folder / "model", request.param)), "dtype": "float32"}
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 512}
    with serve({"model": model, "server": server}, folder, "file") as url:
        yield SeeingRun(folder, url)


def test_vllm_sees_with_the_trained_tower(run: SeeingRun, caplog: pytest.LogCaptureFixture) -> None:
    run.check(caplog)


def test_vllm_with_features_of_older_weights_is_caught(run: SeeingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    version = STEPS + 1
    run.push(version)
    with torch.no_grad():
        for weight in tower_of(run.learner.policy.network).parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    post = ServerControl.post
    monkeypatch.setattr(
        ServerControl, "post", lambda self, path, *more: {} if path == FORGET_FEATURES else post(self, path, *more)
    )
    with pytest.raises(SyncError, match="serves other weights"):
        run.push(version + 1)
