"""Two stages that train one adapter, or merge it, by the command line: resumed, exported and evaluated."""

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


@pytest.fixture
def done(
    agentfactory: Command,
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """`done(*arguments)`: run the command in a folder with `both.yaml`, SFT and GRPO on saved rows."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "model")
    write_groups(tmp_path / "groups.jsonl", make_groups(8, 4))
    course = {"batch_size": 2, "learning_rate": 1e-2, "from_trajectories": "groups.jsonl", "checkpoint_every": 1}
    model: dict[str, Any] = {"path": "model", "dtype": "float32", "lora": {"rank": 3}}
    sft = {"name": "sft", "model": model, "train": {**course, "algorithm": "sft", "steps": 2}}
    loss = {"kl": {"coefficient": 0.1}}
    grpo = {"name": "grpo", "model": {**model, "lora": {}}, "train": {**course, "steps": 3, "loss": loss}}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump({"stages": [sft, grpo]}))

    def run(*arguments: str) -> str:
        result = agentfactory(*arguments)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    return run


@torch.no_grad()
def scores(network: Any) -> Tensor:
    return network(IDS).logits.log_softmax(-1)


def network(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def metrics(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]


def last(stage: Path) -> Path:
    return max((stage / "checkpoints").glob("step-*"))


def test_an_adapter_goes_on_and_resumes_between_and_within_stages(done: Callable[..., str], tmp_path: Path) -> None:
    said = done("train", "both.yaml", "output=whole")
    assert "continues the adapter in whole/sft/checkpoints/step-000002 (rank 3) on " in said
    assert metrics(tmp_path / "whole/grpo")[0]["kl"] == 0

    # as killed between the stages, and then within the second
    half = tmp_path / "half"
    done("train", "both.yaml", "output=half", "grpo.train.steps=1")
    shutil.rmtree(half / "grpo")
    said = done("train", "both.yaml", "output=half", "--resume", "grpo.train.steps=1")
    assert "stage 1 of 2: sft (completed)" in said
    moved = half.rename(tmp_path / "moved")
    done("train", str(moved / "recipe.yaml"), "--resume", "grpo.train.steps=3")
    whole, resumed = (load_file(last(tmp_path / name / "grpo") / WEIGHTS) for name in ("whole", "moved"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    done("export", "whole", "--output", "exported")
    expected = scores(PeftModel.from_pretrained(network(tmp_path / "model"), last(tmp_path / "whole/grpo")))
    torch.testing.assert_close(scores(network(tmp_path / "exported")), expected, atol=1e-5, rtol=0)
    before = scores(PeftModel.from_pretrained(network(tmp_path / "model"), last(tmp_path / "whole/sft")))
    assert (expected - before).abs().max() > 0.01

    # by another run, from the checkpoint, with its own fields
    recipe = yaml.safe_load((tmp_path / "both.yaml").read_text())["stages"][1]
    recipe["model"]["lora"] = {"from": "whole/grpo/checkpoints/step-000003"}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(recipe))
    done("train", "more.yaml", "output=more", "train.steps=1")
    assert metrics(tmp_path / "more")[0]["kl"] == 0


def test_a_stage_of_another_rank_trains_on_the_merged_base(done: Callable[..., str], tmp_path: Path) -> None:
    said = done("train", "both.yaml", "output=run", "grpo.model.lora.rank=2", "grpo.train.steps=1")
    assert "is first merged into " in said
    assert "(rank is 2, not 3)" in said
    assert "\nmerged in float32\n" in said
    sft, grpo = tmp_path / "run/sft", tmp_path / "run/grpo"
    expected = scores(PeftModel.from_pretrained(network(tmp_path / "model"), last(sft)))
    merged = scores(network(grpo / "merged"))
    # the sum is rounded to float32
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)
    assert (merged - scores(network(tmp_path / "model"))).abs().max() > 0.01
    assert metrics(grpo)[0]["kl"] == 0

    moved = (tmp_path / "run").rename(tmp_path / "moved")
    done("train", str(moved / "recipe.yaml"), "--resume", "grpo.train.steps=2")
    grpo = moved / "grpo"
    done("export", "moved", "--output", "exported")
    expected = scores(PeftModel.from_pretrained(network(grpo / "merged"), last(grpo)))
    torch.testing.assert_close(scores(network(tmp_path / "exported")), expected, atol=1e-5, rtol=0)


@pytest.mark.long
def test_an_adapter_goes_on_by_accelerate_launch(quickstart_run: Path, warm_start: Path, tmp_path: Path) -> None:
    engine = {"engine": "embedded", "max_model_len": 512, "max_num_seqs": 64}
    check_it_goes_on(engine, warm_start, quickstart_run / "prepared", tmp_path)
