"""Splitting, ordering and distributing rows changes nothing: one SGD step at learning rate 1, by the user's command, or
for a single process by the code that the command runs in it.

The rows were sampled by the trained model itself, in the quickstart's first step."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Group
from tests.conftest import QUICKSTART
from tests.forked import TRAINER, Forked
from tests.saved_groups import write_groups

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]

TOLERANCE = 1e-5
WHOLE, HALVES, SINGLES = 16384, 700, 1
"""Token budgets: all rows in one micro-batch, in a few, or one row in each."""


@pytest.fixture(scope="session")
def ragged(quickstart_run: Path) -> list[Group]:
    """Three groups of 5, 7 and 3 chains: 15 rows, which two processes cannot share evenly."""
    groups = list(read_groups(quickstart_run / "grpo" / "trajectories" / "train.jsonl"))[:8]
    varied = [group for group in groups if len({t.reward for t in group.trajectories}) > 2][:3]
    for group, size in zip(varied, (5, 7, 3), strict=True):
        group.trajectories = sorted(group.trajectories, key=lambda t: t.reward or 0.0)[:: 16 // size][:size]
    return varied


class Trained:
    """The results of one step: exported weights, metrics, and the tokens' credit."""

    def __init__(self, output: Path):
        checkpoint = next((output / "checkpoints").iterdir())
        self.weights = load_file(checkpoint / "model.safetensors")
        self.metrics: dict[str, Any] = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
        self.credit: dict[str, list[dict[str, Any]]] = {}
        """Each chain's entry in credit.jsonl."""
        for line in (output / "trajectories" / "credit.jsonl").read_text().splitlines():
            self.credit |= json.loads(line)["chains"]


def train(groups: list[Group], model: Path, output: Path, command: bool = False, **settings: Any) -> Trained:
    """Run one step on saved groups; `settings` are fields of `train:`. `command` forces the use of `agentfactory train`
    even if it would only start train.py."""
    saved = output.parent / f"{output.name}.jsonl"
    write_groups(saved, groups)
    recipe = {
        "model": {"path": str(model), "dtype": "float32"},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "train": {
            "from_trajectories": str(saved),
            "steps": 1,
            "batch_size": len(groups),
            "learning_rate": 1.0,
            "max_grad_norm": 1e9,
            "optimizer": {"name": "sgd", "betas": [0.0, 0.0]},
            **settings,
        },
    }
    file = output.parent / f"{output.name}.yaml"
    file.write_text(json.dumps(recipe))
    if command or "processes" in settings:
        arguments = [sys.executable, "-m", "agentfactory", "train", str(file), f"output={output}"]
        subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    else:
        trainer = Forked(TRAINER, str(file), f"output={output}", log=output.with_suffix(".log"))
        assert trainer.wait() == 0, trainer.log.read_text()
    return Trained(output)


@pytest.fixture(scope="session")
def reference(ragged: list[Group], warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("invariance")
    return train(ragged, warm_start, folder / "reference", command=True, batching="padded", token_budget=WHOLE)


def test_the_step_moves_the_weights(reference: Trained, warm_start: Path) -> None:
    before = load_file(warm_start / "model.safetensors")
    moved = max(float((reference.weights[name] - before[name]).abs().max()) for name in before)
    assert moved > 1000 * TOLERANCE
    assert reference.metrics["mismatch/max"] <= 1e-4, "the rows were sampled by these weights"


def shuffled(groups: list[Group]) -> list[Group]:
    draw = random.Random(1)
    mixed = [Group(g.id, g.task, draw.sample(g.trajectories, len(g.trajectories)), g.version) for g in groups]
    return draw.sample(mixed, len(mixed))


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "padded", "token_budget": SINGLES},
        {"batching": "packed", "token_budget": HALVES},
        {"batching": "tree", "token_budget": HALVES},
        {"batching": "auto", "order": "shuffled", "token_budget": WHOLE},
        {"batching": "padded", "processes": 2, "strategy": "fsdp2", "token_budget": HALVES},
        pytest.param(
            {"batching": "tree", "processes": 2, "strategy": "ddp", "token_budget": HALVES}, marks=pytest.mark.long
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_one_step_is_the_same(
    reference: Trained, ragged: list[Group], warm_start: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = dict(settings)
    groups = shuffled(ragged) if settings.pop("order", None) else ragged
    other = train(groups, warm_start, tmp_path / "run", **settings)
    assert other.metrics["tokens"] == reference.metrics["tokens"] > 100
    assert other.metrics["grad_norm"] == pytest.approx(reference.metrics["grad_norm"], rel=1e-5)
    assert other.metrics["loss"] == pytest.approx(reference.metrics["loss"], rel=1e-5, abs=1e-6)
    assert other.credit.keys() == reference.credit.keys()
    for chain, (expected,) in reference.credit.items():
        (credited,) = other.credit[chain]
        assert credited["targets"] == expected["targets"]
        for name in ("advantage", "proximal"):
            assert credited[name] == pytest.approx(expected[name], abs=1e-5)
    assert set(other.weights) == set(reference.weights)
    for name, weights in reference.weights.items():
        torch.testing.assert_close(other.weights[name], weights, rtol=0, atol=TOLERANCE)
