"""A checkpoint has the learner's state at its beginning, on every rank, however late it is written."""

import itertools
import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import PreTrainedTokenizerFast

from agentfactory.base.files.disk import DiskError
from agentfactory.trainers.checkpoints import checkpoint
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints, CheckpointWriter
from agentfactory.trainers.checkpoints.checkpoint_folder import verify
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state
from tests.forked import start_ranks
from tests.saved_checkpoint import save_checkpoint, training_state
from tests.trainers.conftest import Make, make_groups, on_cpu, take_step

pytestmark = pytest.mark.numbers


SETTINGS: dict[str, dict[str, Any]] = {"full": {}, "adapter": {"lora": {"rank": 2}}, "critic": {"algorithm": "ppo"}}


def files(checkpoint: Path) -> dict[str, bytes]:
    """Return all files whose bytes are comparable; shard files contain their own names."""
    found = [path for path in checkpoint.iterdir() if path.suffix in (".json", ".safetensors")]
    return {path.name: path.read_bytes() for path in found if path.name != "digests.json"}


def same_state(one: Path, other: Path) -> bool:
    first, second = training_state(one), training_state(other)
    assert first.pop("settings") == second.pop("settings")
    return first.keys() == second.keys() and all(torch.equal(second[key], value) for key, value in first.items())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that the writing of checkpoints waits for."""
    is_open, write = threading.Event(), checkpoint.write_part
    monkeypatch.setattr(checkpoint, "write_part", lambda *arguments: is_open.wait() and write(*arguments))
    yield is_open
    # a waiting thread would keep the test process alive
    is_open.set()


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_trained_meanwhile_is_not_in_it(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, gate: threading.Event, case: str
) -> None:
    recipe = make_recipe(**{"steps": 9, "batch_size": 2, "learning_rate": 1e-2, **SETTINGS[case]})
    learner = Learner(recipe, on_cpu())
    take_step(learner, recipe, make_groups(2, 3))
    gate.set()
    at_once = save_checkpoint(tmp_path / "at once", 1, learner, tokenizer, {"seed": 7})
    gate.clear()
    writer = CheckpointWriter(tmp_path / "meanwhile", tokenizer)
    writer.begin(1, learner, {"seed": 7})
    for seed in (1, 2):
        take_step(learner, recipe, make_groups(2, 3, seed=seed))
    torch.rand(3)
    assert not writer.is_done
    gate.set()
    path = writer.wait()
    verify(path)
    assert same_state(path, at_once)
    assert files(path) == files(at_once)
    # the memory of the copy is reused
    later = save_checkpoint(tmp_path / "at once", 3, learner, tokenizer, {"seed": 7})
    writer.begin(3, learner, {"seed": 7})
    last = writer.wait()
    assert same_state(last, later)
    assert files(last) != files(path)


def test_it_counts_once_it_is_durable(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, gate: threading.Event
) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("one\n")
    recipe = make_recipe(steps=9, checkpoint_every=2, keep_last=1)
    folder, learner = tmp_path / "checkpoints", Learner(recipe, on_cpu())
    checkpoints = Checkpoints(folder, tokenizer, recipe.train, files=lambda: {"metrics": log})
    with checkpoints.ending():
        checkpoints.train_state.finish(2, ["a", "b"], seconds=1.0)
        checkpoints.save(learner)
        checkpoints.train_state.finish(3, ["c"], seconds=1.0)
        log.write_text("one\ntwo\n")
        checkpoints.poll(on_cpu())
        assert (checkpoints.saved_step, checkpoints.path, checkpoints.take_groups()) == (2, None, [])
        gate.set()
        checkpoints.wait()
        assert (checkpoints.path, checkpoints.take_groups()) == (folder / "step-000002", ["a", "b"])
        state = json.loads((folder / "step-000002" / "trainer_state.json").read_text())
        assert (state["step"], state["groups"], state["files"]) == (2, ["a", "b"], {"metrics": 4})
        checkpoints.train_state.finish(4, ["d"], seconds=1.0)
        checkpoints.save(learner)
    # after the loop it is written, and the previous one is deleted
    assert (checkpoints.path, checkpoints.take_groups()) == (folder / "step-000004", ["c", "d"])
    assert [path.name for path in folder.iterdir()] == ["step-000004"]


def test_an_error_in_the_loop_waits_for_what_is_being_written(
    make_recipe: Make,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(steps=9)
    checkpoints, wait = Checkpoints(tmp_path, tokenizer, recipe.train), CheckpointWriter.wait

    def open_and_wait(writer: CheckpointWriter) -> Path | None:
        gate.set()
        return wait(writer)

    def fail() -> None:
        checkpoints.train_state.finish(1, [], seconds=1.0)
        checkpoints.save(Learner(recipe, on_cpu()))
        monkeypatch.setattr(CheckpointWriter, "wait", open_and_wait)
        raise FloatingPointError("a gradient")

    with pytest.raises(FloatingPointError, match="a gradient"), checkpoints.ending():
        fail()
    verify(tmp_path / "step-000001")


def test_an_error_of_the_writing_ends_the_run(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(checkpoint, "_write_model", full)
    recipe = make_recipe(steps=9)
    checkpoints = Checkpoints(tmp_path, tokenizer, recipe.train)
    checkpoints.train_state.finish(1, ["a"], seconds=1.0)
    checkpoints.save(Learner(recipe, on_cpu()))

    polled = (checkpoints.poll(on_cpu()) for _ in itertools.count())
    with pytest.raises(DiskError, match=rf"{tmp_path}/step-000001 cannot be written: No space left.*; fix: make room"):
        deque(polled, maxlen=0)
    assert (checkpoints.path, checkpoints.take_groups(), list(tmp_path.iterdir())) == (None, [], [])


def write_as_before(folder: Path, learner: Learner) -> Path:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "weights": {name: weight.detach() for name, weight in learner.model.named_parameters() if weight.requires_grad},
        "optimizer": get_optimizer_state_dict(learner.model, learner.optimizer.optimizer, options=options),
        "schedule": learner.schedule.state_dict(),
        "random": [{"cpu": torch.get_rng_state()}],
    }
    folder.mkdir()
    torch.save(state, folder / "training_state.pt")
    return folder


@pytest.mark.parametrize("case", ["full", "critic"])
def test_one_of_0_1_goes_on_bit_by_bit(make_recipe: Make, tmp_path: Path, case: str) -> None:
    course = {"steps": 9, "batch_size": 2, "learning_rate": 1e-2, "schedule": "cosine"}
    recipe = make_recipe(**{**course, **SETTINGS[case]})
    learner = Learner(recipe, on_cpu())
    for seed in (1, 2):
        take_step(learner, recipe, make_groups(2, 3, seed=seed))
    before = write_as_before(tmp_path / "before", learner)
    random = torch.get_rng_state()
    resumed = Learner(recipe, on_cpu())
    load_state(before, resumed)
    assert torch.equal(torch.get_rng_state(), random)
    for one in (learner, resumed):
        take_step(one, recipe, make_groups(2, 3, seed=3))
    assert resumed.learning_rate == learner.learning_rate
    weights = dict(resumed.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in learner.model.named_parameters())


@pytest.mark.processes
def test_every_rank_writes_its_part_and_learns_of_a_full_disk(make_recipe: Make, tmp_path: Path) -> None:
    course = {"steps": 9, "batch_size": 2, "learning_rate": 1e-2}
    one, two = make_recipe(**course), make_recipe(**course, processes=2, strategy="fsdp2")
    learner = Learner(one, on_cpu())
    take_step(learner, one, make_groups(2, 3))
    before = write_as_before(tmp_path / "before", learner)
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    arguments = (two.model_dump_json(), str(folder), str(before))
    ranks = start_ranks("tests.trainers.launched_writing", *arguments, log=log, strategy="fsdp2")
    assert [rank.wait() for rank in ranks] == [0, 0], log.read_text()
    told = [f"{folder}/step-{step:06d} cannot be written: File too large" for step in (2, 3)]
    for rank in (0, 1):
        said = (tmp_path / f"rank-{rank}.txt").read_text().splitlines()
        assert [line.partition(" (")[0] for line in said] == told, rank
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000004", "step-000005"]
    for path in folder.iterdir():
        verify(path)
        shards = [path / "training_state" / f"__{rank}_0.distcp" for rank in (0, 1)]
        digests = json.loads((path / "digests.json").read_text())
        assert {str(shard.relative_to(path)) for shard in shards} <= digests.keys()
        sizes = [shard.stat().st_size for shard in shards]
        assert 0.8 < sizes[0] / sizes[1] < 1.25, "each rank writes its half"
    loaded, expected = training_state(folder / "step-000005"), torch.load(before / "training_state.pt")
    for name, weight in expected["weights"].items():
        assert torch.equal(loaded[f"weights/{name}"], weight)
        for slot, value in expected["optimizer"]["state"][name].items():
            assert torch.equal(loaded[f"optimizer/{name}/{slot}"], value)
