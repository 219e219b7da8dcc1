"""Images on two processes: the results equal one process's, even if only one of them has images."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from agentfactory.trainers.batches.batch import TrainingRow, make_batches, training_row
from agentfactory.trainers.config import TrainRecipe
from tests.trainers.launched_images import scores_and_weights
from tests.trainers.ranks import on_ranks
from tests.vision_models import make_vision_model
from tests.vision_rows import Album

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]

PLAIN = {"steps": 1, "learning_rate": 0.1, "max_grad_norm": 1e9, "optimizer": {"name": "sgd", "betas": [0.0, 0.0]}}
CASES: dict[str, list[dict[str, Any]]] = {
    "qwen3_vl": [{"gradient_checkpointing": True}, {"vision": 0.3}],
    "qwen2_5_vl": [{"vision": "trained", "gradient_checkpointing": True, "algorithm": "ppo"}, {"lora": {"rank": 2}}],
}
BUDGET = 120


def rows_of(album: Album) -> list[TrainingRow]:
    """Seven long rows of text, and two of one group with images."""
    image, crop = album.image(90, 90, 1), album.image(64, 64, 2)
    prompt, turn = album.text(8), album.text(4)
    rows = [album.row(album.text(30), 60) for _ in range(7)]
    rows += [album.row(prompt, image, turn, 3, album.text(3), crop, count) for count in (3, 6)]
    return [training_row(row, advantage=album.draw.uniform(-1, 1)) for row in rows]


@pytest.mark.parametrize(("kind", "strategy"), [("qwen2_5_vl", "fsdp2"), ("qwen3_vl", "ddp")])
def test_two_processes_equal_one(tmp_path: Path, strategy: str, kind: str) -> None:
    model = make_vision_model(tmp_path / "model", kind)
    album = Album(model, tmp_path / "images")
    rows = rows_of(album)
    shares = make_batches(rows, "tree", BUDGET, processes=2, vision=album.vision)
    seen = [[bool(part.images) for part in share.micro_batches] for share in shares]
    assert any(one != other for one, other in zip(*seen, strict=True))

    def recipe(case: dict[str, Any], processes: int) -> TrainRecipe:
        train = {**PLAIN, **case, "token_budget": BUDGET, "processes": processes, "loss": {"kl": {"coefficient": 0.1}}}
        train["strategy"] = strategy if processes > 1 else "single"
        section = {"path": str(model), "dtype": "float32", "lora": train.pop("lora", None)}
        return TrainRecipe.model_validate({"model": section, "train": train})

    (tmp_path / "rows").write_bytes(pickle.dumps(rows))
    places = (album.store.folder, tmp_path / "rows")
    found, _ = on_ranks(scores_and_weights, [recipe(case, 2) for case in CASES[kind]], tmp_path, strategy, *places)
    for case, given in zip(CASES[kind], found, strict=True):
        expected = scores_and_weights(recipe(case, 1), Accelerator(cpu=True), *places)
        for part in ("scores", "loss", "grad_norm", "weights"):
            torch.testing.assert_close(given[part], expected[part], atol=2e-5, rtol=2e-4)
