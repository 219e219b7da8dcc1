"""A learner that trains a vision tower, with a server of the same model and the sync canary."""

from pathlib import Path

import pytest
from accelerate import Accelerator

from agentfactory.base.run_notices import notice_of
from agentfactory.rollout.images.families import load_vision
from agentfactory.trainers.batches.batch import training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.sync.canary import Canary, canary_rows, with_image_rows
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.proven_push import push_proven
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy
from tests.vision_rows import LEAST, MOST, Album

STEPS = 2


class SeeingRun:
    """A run that trains on an image and pushes weights to a server."""

    def __init__(self, folder: Path, url: str) -> None:
        self.album = Album(folder / "model", folder / "images")
        model = {"path": str(folder / "model"), "dtype": "float32"}
        self.recipe = TrainRecipe.model_validate(
            {"model": model, "train": {"steps": STEPS, "learning_rate": 1e-3, "vision": "trained"}}
        )
        self.learner = Learner(self.recipe, Accelerator(cpu=True), images=self.album.store.folder)
        self.server = ServerControl(url)
        rows = canary_rows(range(LEAST, MOST), longest=144)
        vision = load_vision(model["path"])
        self.canary = Canary([self.server], with_image_rows(rows, vision, self.album.store), "float32")
        self.sync = FileSync([self.server], folder / "sync")

    def train(self) -> None:
        row = self.album.row(self.album.text(9), self.album.image(120, 90), self.album.text(9), 40)
        made = [training_row(row, sign) for sign in (1.0, -0.5)]
        update_policy(self.learner, self.learner.deal([row for row in made if row is not None]), self.recipe)

    def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """Assert that each version's weights are proven by their content."""
        for version in range(STEPS + 1):
            proof = self.push(version)
            self.train()
        assert proof["sync/canary_noise"] < 1e-4
        assert proof["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
        assert not [record for record in caplog.records if notice_of(record)]

    def push(self, version: int) -> dict[str, float]:
        learner = self.learner
        scores = self.canary.trainer_scores(learner.policy, images=learner.images)
        return push_proven(self.sync, self.canary, version, learner.policy, learner.policy.gather(), scores)[1]
