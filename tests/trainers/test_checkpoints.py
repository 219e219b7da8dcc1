"""Checkpoints load in transformers and peft, are never partial, training continues from them bit for bit, and each has
the learner's state at its beginning, on every rank, however late it is written."""

import io
import itertools
import json
import math
import os
import pathlib
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentfactory.base.files.disk import DiskError
from agentfactory.trainers.checkpoints import checkpoint
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints, CheckpointWriter
from agentfactory.trainers.checkpoints.checkpoint_folder import verify
from agentfactory.trainers.config import TeacherConfig
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state, part_of, write_part
from tests.forked import start_ranks
from tests.saved_checkpoint import save_checkpoint, training_state
from tests.trainers.conftest import Make, make_groups, on_cpu, take_step
from tests.trainers.resumed import train_twice

pytestmark = pytest.mark.numbers


def test_transformers_loads_a_checkpoint(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    recipe = make_recipe()
    recipe.model.dtype = "bfloat16"
    learner = Learner(recipe, on_cpu())
    path = save_checkpoint(tmp_path, 80, learner, tokenizer, {"seed": 7, "groups": ["g1"]})
    assert path == tmp_path / "step-000080"
    assert [child.name for child in tmp_path.iterdir()] == ["step-000080"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == torch.bfloat16
    for name, value in learner.policy.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template
    state = json.loads((path / "trainer_state.json").read_text())
    assert state == {"step": 80, "seed": 7, "groups": ["g1"]}
    # training continues in float32; the model's file has less precision
    held = training_state(path)
    assert {value.dtype for key, value in held.items() if key.startswith("weights/")} == {torch.float32}


def test_other_weights_are_refused(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, Learner(make_recipe(lora={"rank": 2}), on_cpu()), tokenizer, {})
    with pytest.raises(ValueError, match=r"holds other weights than are trained, such as model\."):
        load_state(path, Learner(make_recipe(), on_cpu()))


RECORDED: dict[str, dict[str, Any]] = {
    "every weight, several updates": {"updates_per_batch": 2},
    "adapter": {"lora": {"rank": 2}, "algorithm": "sft", "batch_size": 5},
    "critic of its own, alone at first": {
        "algorithm": "ppo",
        "advantage": {"options": {"critic_warmup_steps": 3, "critic_learning_rate": 1e-3}},
    },
    "critic as an adapter": {"algorithm": "ppo", "lora": {"rank": 2}},
    "muon": {"optimizer": {"name": "muon"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "taught": {"algorithm": "distill", "teacher": {"divergence": "reverse_kl"}, "loss": {"normaliser": "sequence"}},
}


RARE = {"taught", "critic as an adapter", "muon", "adafactor"}
RARELY = [pytest.param(case, marks=[pytest.mark.extended] if case in RARE else []) for case in RECORDED]


@pytest.mark.parametrize("case", RARELY)
def test_goes_on_bit_by_bit(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, case: str) -> None:
    settings = {"batch_size": 2, "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1, "checkpoint_every": 2}
    fields = {**settings, **RECORDED[case], "steps": 5}
    teacher = fields.pop("teacher", None)
    recipe = make_recipe(**fields)
    if teacher is not None:
        recipe = recipe.model_copy(update={"teacher": TeacherConfig(model=recipe.model.path, **teacher)})
    _, *folders = train_twice(recipe, make_groups(10, 4), tokenizer, tmp_path, resume_at=2)
    expected, given = map(training_state, folders)
    assert given.pop("settings") == expected.pop("settings")
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[key], value) for key, value in expected.items())


def test_more_steps_stretch_the_schedule(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    course = {"schedule": "cosine", "learning_rate": 1e-3}
    learner = Learner(make_recipe(steps=4, **course), on_cpu())
    for _ in range(4):
        learner.optimizer.step()
        learner.schedule.step()
    assert learner.learning_rate == pytest.approx(0.0)
    path = save_checkpoint(tmp_path, 4, learner, tokenizer, {})
    longer = Learner(make_recipe(steps=12, **course), on_cpu())
    load_state(path, longer)
    assert longer.learning_rate == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 4 / 12)))
    assert {group["lr"] for group in longer.optimizer.param_groups} == {longer.learning_rate}


def test_those_of_other_pythons_are_read(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    learner = Learner(make_recipe(), on_cpu())
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11.2
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
        # Python 3.13
        patch.setattr(type(tmp_path), "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", pathlib)
        path = save_checkpoint(tmp_path, 1, learner, tokenizer, {})
    metadata = (path / "training_state" / ".metadata").read_bytes()
    assert b"getattr" in metadata
    assert b"pathlib._local" in metadata
    load_state(path, Learner(make_recipe(), on_cpu()))


class Trap:
    """An object that unpickles to the result of a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def test_somebody_elses_runs_nothing(make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    learner = Learner(make_recipe(), on_cpu())
    path = save_checkpoint(tmp_path, 1, learner, tokenizer, {})
    metadata = path / "training_state" / ".metadata"
    usual = metadata.read_bytes()
    command = Trap(os.system, f"touch {tmp_path}/ran")
    metadata.write_bytes(pickle.dumps(command))
    with pytest.raises(ValueError, match=r"names posix\.system, which describes no tensor"):
        load_state(path, learner)
    metadata.write_bytes(pickle.dumps(Trap(getattr, Metadata, "__init__")))
    with pytest.raises(ValueError, match=r"names __init__ of .*, which describes no tensor"):
        load_state(path, learner)
    elsewhere = pickle.loads(usual)
    for stored in elsewhere.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"
    metadata.write_bytes(pickle.dumps(elsewhere))
    with pytest.raises(ValueError, match=r"names '\.\./.*', outside its folder"):
        load_state(path, learner)
    metadata.write_bytes(usual)
    part = {key: value for key, value in part_of(learner).items() if key != "settings"}
    (path / "training_state").rename(tmp_path / "before")
    file = io.BytesIO()
    torch.save(command, file)
    write_part({**part, "settings": torch.tensor([*file.getvalue()], dtype=torch.uint8)}, path / "training_state", None)
    with pytest.raises(ValueError, match="hold more than numbers and texts: Weights only load failed"):
        load_state(path, learner)
    assert not (tmp_path / "ran").exists()


# ---- written in the background


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
        checkpoints.poll()
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

    polled = (checkpoints.poll() for _ in itertools.count())
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
