"""Updates on meshes of processes: sharded, copied, and sharded within machines and copied between them. All equal one
process, also after they resume each other's checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes import accelerator as accelerator_module
from agentfactory.trainers.processes.accelerator import LaunchError, launch_command, make_accelerator
from agentfactory.trainers.update.learner_state import TRAINING_STATE, StateReader
from tests.trainers.conftest import Make, on_cpu
from tests.trainers.launched_updates import exercise
from tests.trainers.ranks import on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]

SGD = {"optimizer": {"name": "sgd"}, "learning_rate": 0.1, "max_grad_norm": 0.05, "token_budget": 45}
CRITIC = {"algorithm": "ppo", "advantage": {"options": {"critic_learning_rate": 0.1}}}
CASES: dict[str, dict[str, Any]] = {
    # the first decides how DDP is set up
    "critic": {**CRITIC, "batching": "packed"},
    "packed": {"batching": "packed"},
    "tree": {"batching": "tree", "token_budget": 70},
    "adapter": {"lora": {"rank": 3}, "gradient_checkpointing": True},
    "two adapters": {**CRITIC, "lora": {"rank": 3}},
}
UNITS = {"critic": 6, "packed": 3, "tree": 3, "adapter": 2, "two adapters": 5}
"""Units of FSDP2 with trained weights, once for each role: two layers, and the rest unless it is frozen."""
RARELY = [pytest.mark.long]
MESHES = [
    ("hsdp", 4, 2),
    pytest.param("fsdp2", 4, 1, marks=RARELY),
    pytest.param("ddp", 4, 1, marks=RARELY),
    pytest.param("fsdp2", 2, 1, marks=RARELY),
    pytest.param("ddp", 2, 1, marks=RARELY),
]

Results = list[list[dict[str, Any]]]
"""Updates by case."""


def recipes(make_recipe: Make, strategy: str, processes: int) -> list[TrainRecipe]:
    """A recipe for each case, with its number as the seed."""
    made = [make_recipe(**{**SGD, **case}, strategy=strategy, processes=processes) for case in CASES.values()]
    return [recipe.model_copy(update={"seed": seed}) for seed, recipe in enumerate(made)]


@pytest.fixture(scope="module")
def alone(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The checkpoints and updates of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, [exercise(recipe, on_cpu(), folder) for recipe in recipes(make_recipe, "single", 1)]


def assert_same(given: Results, expected: Results) -> None:
    for case, mine, theirs in zip(CASES, given, expected, strict=True):
        for update, wanted in zip(mine, theirs[-len(mine) :], strict=True):
            for name in ("loss", "norm"):
                assert update[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), (case, name)
            # clipped to 0.05
            assert wanted["norm"] > 0.5
            for name in ("before", "after", "weights"):
                torch.testing.assert_close(update[name], wanted[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("strategy", "count", "machines"), MESHES)
def test_any_mesh_equals_one_process(
    make_recipe: Make, alone: tuple[Path, Results], tmp_path: Path, strategy: str, count: int, machines: int
) -> None:
    folder, expected = alone
    made = recipes(make_recipe, strategy, count)
    ranks = on_ranks(exercise, made, tmp_path, strategy, tmp_path, count=count, machines=machines)
    for rank in ranks:
        assert_same(rank, expected)
        # copies stay copies, bit by bit
        for mine, first in zip(rank, ranks[0], strict=True):
            torch.testing.assert_close(mine[1]["weights"], first[1]["weights"], atol=0, rtol=0)
    for number, (case, units) in enumerate(UNITS.items()):
        for update in ranks[0][number]:
            parts, sizes = update["micro-batches"], update["bytes"]
            calls = {name: f"{len(found)} calls, {sum(found)} bytes" for name, found in sizes.items()}
            print(f"{strategy}, {count} processes, {case}: {parts} micro-batches, {calls}")
            assert parts > 1
            if strategy == "ddp":
                # its reducer calls no function of Python
                continue
            # sums of a machine's processes in every pass, sums of machines once for each role
            assert len(sizes["reduce_scatter_single"]) == parts * units
            assert len(sizes["all_reduce"]) == (units if strategy == "hsdp" else 0)
            # a share in float32, padded to equal ones
            share = 4 * sum(weight.numel() for weight in update["weights"].values()) * machines / count
            one_pass = sum(sizes["reduce_scatter_single"]) / parts
            assert share <= one_pass <= 1.2 * share
            assert sum(sizes["all_reduce"]) == (one_pass if strategy == "hsdp" else 0)
        # gathered on rank 0
        saved, own = (path / str(number) / "step-000001" for path in (tmp_path, folder))
        (model,) = saved.glob("*.safetensors")
        for name, weight in load_file(own / model.name).items():
            torch.testing.assert_close(load_file(model)[name], weight, atol=1e-6, rtol=1e-5)
        # each shard is in one file, although two machines have it
        state = saved / TRAINING_STATE
        indexed = StateReader(state).read_metadata().storage_data.values()
        assert sum(entry.length for entry in indexed) == sum(file.stat().st_size for file in state.glob("*.distcp"))
    # one process resumes from it
    assert_same([exercise(recipe, on_cpu(), tmp_path) for recipe in recipes(make_recipe, "single", 1)], expected)


@pytest.mark.long
def test_meshes_resume_from_each_other(make_recipe: Make, alone: tuple[Path, Results], tmp_path: Path) -> None:
    folder, expected = alone
    hsdp, fsdp2 = (recipes(make_recipe, strategy, 4) for strategy in ("hsdp", "fsdp2"))
    for name in ("copied", "hsdp"):
        (tmp_path / name).mkdir()
    shutil.copytree(folder, tmp_path / "alone")
    # from one process to 2 x 2
    for rank in on_ranks(exercise, hsdp, tmp_path, "hsdp", tmp_path / "alone", count=4, machines=2):
        assert_same(rank, expected)
    first = on_ranks(exercise, hsdp, tmp_path, "hsdp", tmp_path / "hsdp", count=4, machines=2)
    again = on_ranks(exercise, hsdp, tmp_path, "hsdp", tmp_path / "hsdp", count=4, machines=2)
    for mine, theirs in zip(again, first, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one[0]["weights"], other[1]["weights"], atol=0, rtol=0)
    # from 2 x 2 to 4 shards
    for rank in on_ranks(exercise, fsdp2, tmp_path, "fsdp2", tmp_path / "hsdp", count=4):
        assert_same(rank, expected)


@pytest.mark.parametrize(
    ("world", "local", "rank", "place"), [(4, 4, 0, 0), (4, 1, 1, 0), (4, 3, 0, 0), (4, 0, 0, 0), (4, 2, 2, 1)]
)
def test_machines_that_cannot_shard_and_copy_are_refused(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, world: int, local: int, rank: int, place: int
) -> None:
    told = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "RANK": rank, "LOCAL_RANK": place}
    for name, value in {**told, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(accelerator_module, "init_method", lambda urls: None)
    recipe = make_recipe(processes=world, strategy="hsdp")
    with pytest.raises(LaunchError, match=rf"hsdp .* but {local} of {world} processes are on this one .*use fsdp2"):
        make_accelerator(recipe)
    assert "recipes/accelerate/hsdp.yaml --num_machines MACHINES --mach" in launch_command(recipe.train, "cuda")
