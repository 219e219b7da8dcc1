"""Two stages that train one adapter, or merge it, by the command line: resumed, moved and exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.continued_adapter import check_it_goes_on
from tests.project import Command
from tests.saved_groups import write_groups
from tests.trainers.conftest import make_groups, model_folder  # noqa: F401

pytestmark = [pytest.mark.processes, pytest.mark.extended]

IDS = torch.arange(3, 19)[None]
WEIGHTS = "adapter_model.safetensors"
STAGES = ("sft", "grpo")


@pytest.fixture
def done(agentfactory: Command) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        result = agentfactory(*arguments, status=0)
        return result.stdout

    return run


@pytest.fixture
def whole(
    done: Callable[..., str],
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A run of `both.yaml`, SFT and GRPO on saved rows with one adapter, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "model")
    write_groups(tmp_path / "groups.jsonl", make_groups(8, 4))
    course = {"batch_size": 2, "learning_rate": 1e-2, "from_trajectories": "groups.jsonl", "checkpoint_every": 1}
    model: dict[str, Any] = {"path": "model", "dtype": "float32", "lora": {"rank": 3}}
    sft = {"name": "sft", "model": model, "train": {**course, "algorithm": "sft", "steps": 2}}
    loss = {"kl": {"coefficient": 0.1}}
    grpo = {"name": "grpo", "model": {**model, "lora": {}}, "train": {**course, "steps": 3, "loss": loss}}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump({"stages": [sft, grpo]}))
    said = done("train", "both.yaml", "output=whole")
    assert "continues the adapter in whole/sft/checkpoints/step-000002 (rank 3) on " in said
    assert metrics(tmp_path / "whole/grpo")[0]["kl"] == 0
    return tmp_path / "whole"


def killed_between_stages(whole: Path, name: str) -> Path:
    copy = whole.with_name(name)
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("grpo", ".lock"))
    return copy


@torch.no_grad()
def scores(network: Any) -> Tensor:
    return network(IDS).logits.log_softmax(-1)


def network(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def metrics(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]


def last(stage: Path) -> Path:
    return max((stage / "checkpoints").glob("step-*"))


def test_an_adapter_goes_on_or_is_merged_and_resumes(done: Callable[..., str], whole: Path, tmp_path: Path) -> None:
    half = killed_between_stages(whole, "half")
    said = done("train", "both.yaml", "output=half", "--resume", "grpo.train.steps=1")
    assert "stage 1 of 2: sft (completed)" in said
    # a run may be moved between two attempts
    moved = half.rename(tmp_path / "moved")
    done("train", str(moved / "recipe.yaml"), "--resume", "grpo.train.steps=3")
    assert not half.exists()
    weights, resumed = (load_file(last(run / "grpo") / WEIGHTS) for run in (whole, moved))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)

    done("export", "moved", "--output", "exported")
    adapted = [scores(PeftModel.from_pretrained(network(tmp_path / "model"), last(whole / name))) for name in STAGES]
    torch.testing.assert_close(scores(network(tmp_path / "exported")), adapted[1], atol=1e-5, rtol=0)
    assert (adapted[1] - adapted[0]).abs().max() > 0.01

    # a stage of another rank trains on the merged base
    killed_between_stages(whole, "run")
    said = done("train", "both.yaml", "output=run", "--resume", "grpo.model.lora.rank=2", "grpo.train.steps=1")
    assert "is first merged into " in said
    assert "(rank is 2, not 3)" in said
    assert "\nmerged in float32\n" in said
    # the sum is rounded to float32
    merged = scores(network(tmp_path / "run/grpo/merged"))
    torch.testing.assert_close(merged, adapted[0], atol=1e-5, rtol=0)
    assert (merged - scores(network(tmp_path / "model"))).abs().max() > 0.01
    assert metrics(tmp_path / "run/grpo")[0]["kl"] == 0

    # its base moves with it
    grpo = (tmp_path / "run").rename(tmp_path / "elsewhere") / "grpo"
    done("train", "elsewhere/recipe.yaml", "--resume", "grpo.train.steps=2")
    done("export", "elsewhere", "--output", "other")
    expected = scores(PeftModel.from_pretrained(network(grpo / "merged"), last(grpo)))
    torch.testing.assert_close(scores(network(tmp_path / "other")), expected, atol=1e-5, rtol=0)


@pytest.mark.long
def test_an_adapter_goes_on_by_accelerate_launch(quickstart_run: Path, warm_start: Path, tmp_path: Path) -> None:
    engine = {"engine": "embedded", "max_model_len": 512, "max_num_seqs": 64}
    check_it_goes_on(engine, warm_start, quickstart_run / "prepared", tmp_path)
