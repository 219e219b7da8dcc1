"""Networks that see on real vLLM, trained with their towers, synced and proven; an image that the server has seen
before is seen anew after each update, and with the cached features of older weights the proof fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from agentfactory.rollout.images.vision import load_vision
from agentfactory.tools.notices import notice_of
from agentfactory.trainers.batch import training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.learner import Learner
from agentfactory.trainers.policy_update import update_policy
from agentfactory.trainers.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.canary import Canary, canary_rows, push_proven, with_eyes
from agentfactory.trainers.sync.file import FileSync
from agentfactory.trainers.sync.full import FORGET_FEATURES
from tests.server_process import VLLM_PYTHON, serve
from tests.vision_models import KINDS, make_vision_model
from tests.vision_rows import LEAST, MOST, Album

STEPS = 2


class Run:
    """A learner, a server of the same model, and the canary of both."""

    def __init__(self, folder: Path, url: str, **train: Any) -> None:
        self.album = Album(folder / "model", folder / "images")
        model = {"path": str(folder / "model"), "dtype": "float32"}
        self.recipe = TrainRecipe.model_validate(
            {"model": model, "train": {"steps": STEPS, "learning_rate": 1e-3, "vision": "trained", **train}}
        )
        self.learner = Learner(self.recipe, Accelerator(cpu=True), images=self.album.store.folder)
        self.server = ServerControl(url)
        rows = canary_rows(range(LEAST, MOST), longest=144)
        vision = load_vision(model["path"])
        assert vision is not None
        self.canary = Canary([self.server], with_eyes(rows, vision, self.album.store), "float32")
        self.sync = FileSync([self.server], folder / "sync")

    def train(self) -> None:
        row = self.album.row(self.album.text(9), self.album.image(120, 90), self.album.text(9), 40)
        made = [training_row(row, sign) for sign in (1.0, -0.5)]
        update_policy(self.learner, self.learner.deal([row for row in made if row is not None]), self.recipe)

    def push(self, version: int) -> dict[str, float]:
        learner = self.learner
        scores = self.canary.trainer_scores(learner.policy, images=learner.images)
        return push_proven(self.sync, self.canary, version, learner.policy, learner.policy.gather(), scores)[1]


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param)
    model = {"path": str(make_vision_model(folder / "model", request.param)), "dtype": "float32"}
    server = {"engine": "vllm", "python": VLLM_PYTHON, "max_model_len": 512}
    with serve({"model": model, "server": server}, folder, "file") as url:
        yield Run(folder, url)


def test_vllm_sees_with_the_trained_tower(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for version in range(STEPS + 1):
        proof = run.push(version)
        run.train()
    assert proof["sync/canary_noise"] < 1e-4
    assert proof["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
    assert not [record for record in caplog.records if notice_of(record)], "every weight is proven by its content"


def test_vllm_with_features_of_older_weights_is_caught(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    version = STEPS + 1
    run.push(version)
    with torch.no_grad():
        for name, weight in run.learner.policy.named_parameters():
            if ".visual." in name:
                weight.add_(0.05 * torch.randn_like(weight))
    post = ServerControl.post
    monkeypatch.setattr(
        ServerControl, "post", lambda self, path, *more: {} if path == FORGET_FEATURES else post(self, path, *more)
    )
    with pytest.raises(SyncError, match="serves other weights"):
        run.push(version + 1)
    monkeypatch.undo()
    run.push(version + 2)
