"""Updates on meshes of processes: sharded, copied, and sharded within machines and copied between them. All equal one
process, also after they resume each other's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentfactory.trainers.config import TrainRecipe
from tests.saved_checkpoint import training_state
from tests.trainers.conftest import Make, on_cpu
from tests.trainers.launched_updates import exercise
from tests.trainers.ranks import on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]

SGD = {"optimizer": {"name": "sgd"}, "learning_rate": 0.1, "max_grad_norm": 0.05, "token_budget": 70}
CRITIC = {"algorithm": "ppo", "advantage": {"options": {"critic_learning_rate": 0.1}}}
CASES: dict[str, dict[str, Any]] = {
    "packed": {"batching": "packed"},
    "tree": {"batching": "tree"},
    "adapter": {"lora": {"rank": 3}, "gradient_checkpointing": True},
    "critic": {**CRITIC, "batching": "packed"},
    "two adapters": {**CRITIC, "lora": {"rank": 3}},
}
RARE = [pytest.mark.long]


def recipes(make_recipe: Make, strategy: str, processes: int) -> list[TrainRecipe]:
    """The cases, which their seeds name."""
    made = [make_recipe(**SGD, **case, strategy=strategy, processes=processes) for case in CASES.values()]
    return [recipe.model_copy(update={"seed": seed}) for seed, recipe in enumerate(made)]


@pytest.fixture(scope="module")
def alone(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, [exercise(recipe, on_cpu(), folder) for recipe in recipes(make_recipe, "single", 1)]


def assert_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("loss", "norm"):
        assert given[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name in ("before", "after", "weights"):
        torch.testing.assert_close(given[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "count", "machines"),
    [
        ("hsdp", 4, 2),
        pytest.param("fsdp2", 4, 1, marks=RARE),
        pytest.param("ddp", 4, 1, marks=RARE),
        pytest.param("fsdp2", 2, 1, marks=RARE),
        pytest.param("ddp", 2, 1, marks=RARE),
    ],
)
def test_any_mesh_equals_one_process(
    make_recipe: Make, alone: tuple[Path, list[Any]], tmp_path: Path, strategy: str, count: int, machines: int
) -> None:
    folder, expected = alone
    made = recipes(make_recipe, strategy, count)
    ranks = on_ranks(exercise, made, tmp_path, strategy, tmp_path, count=count, machines=machines)
    for number, case in enumerate(CASES):
        for rank in ranks:
            for given, wanted in zip(rank[number], expected[number], strict=True):
                print(strategy, count, case, given["micro-batches"], dict(given["collectives"]))
                assert_same(given, wanted)
