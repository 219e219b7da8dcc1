"""Checkpoints load in transformers and peft, are never partial, and training continues from them bit for bit."""

import io
import json
import math
import os
import pathlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentfactory.trainers.config import TeacherConfig
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state, part_of, write_part
from tests.saved_checkpoint import save_checkpoint, training_state
from tests.trainers.conftest import Make, make_groups, on_cpu
from tests.trainers.resumed import train_twice

pytestmark = pytest.mark.numbers


def test_full_checkpoint_is_loaded_by_transformers(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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
def test_training_goes_on_bit_by_bit(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, case: str
) -> None:
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


def test_more_steps_stretch_the_course_of_the_learning_rate(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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


def test_checkpoints_of_other_pythons_are_read(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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


def test_a_checkpoint_of_somebody_else_runs_nothing(
    make_recipe: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
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
