"""`agentfactory export`: what anybody can load, with the template of the training and nothing else of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.commands.export_command import export
from agentfactory.launching.run_folder import RunFolder, RunFolderError
from agentfactory.trainers.checkpoints.checkpoint_folder import DIGESTS, INFO, digest
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.update.learner import Learner
from tests.project import Command
from tests.saved_checkpoint import save_checkpoint
from tests.trainers.conftest import model_folder, on_cpu, tokenizer  # noqa: F401

pytestmark = pytest.mark.processes

TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
IDS = torch.arange(3, 15)[None]

Make = Callable[..., Path]


def refused(checkpoint: Path, output: Path, told: str, adapter: bool = False, push: str | None = None) -> None:
    with pytest.raises((SettingError, RunFolderError), match=told):
        export(checkpoint, output, adapter=adapter, push=push, say=print)


@pytest.fixture
def make_checkpoint(
    model_folder: Path,  # noqa: F811
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    tmp_path: Path,
) -> Make:
    """`make_checkpoint(lora=..., dtype=...)`: of weights that differ from the base's, with a template of its own."""

    def make(lora: bool, dtype: str = "float32") -> Path:
        # a table of more tokens than the tokenizer knows, as many models have
        config = Qwen3Config.from_pretrained(model_folder, vocab_size=80)
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        model = {"path": str(tmp_path / "base"), "dtype": dtype, "lora": {"rank": 4} if lora else None}
        learner = Learner(TrainRecipe.model_validate({"model": model, "train": {"steps": 1}}), on_cpu())
        with torch.no_grad():
            for weight in learner.policy.parameters():
                if weight.requires_grad:
                    weight.add_(0.05 * torch.randn_like(weight))
        trained = PreTrainedTokenizerFast.from_pretrained(model_folder)
        trained.chat_template = TEMPLATE
        info = {"recipe": yaml.safe_load(yaml.safe_dump({"model": model}))}
        return save_checkpoint(tmp_path / "checkpoints", 7, learner, trained, info)

    return make


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_merged_and_rounded_once(make_checkpoint: Make, tmp_path: Path, dtype: str) -> None:
    checkpoint, output = make_checkpoint(lora=True, dtype=dtype), tmp_path / "out" / "merged"
    output.parent.mkdir()
    export(checkpoint, output, adapter=False, push=None, say=print)
    assert not names(output) & {"adapter_config.json", "adapter_model.safetensors", "training_state", "digests.json"}
    assert "trainer_state.json" not in names(output)
    merged = AutoModelForCausalLM.from_pretrained(output)
    assert merged.dtype == getattr(torch, dtype)
    assert merged.get_input_embeddings().weight.shape[0] == 80
    assert AutoTokenizer.from_pretrained(output).chat_template == TEMPLATE
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = base(IDS).logits
    expected = PeftModel.from_pretrained(base, checkpoint)(IDS).logits
    assert (expected - before).abs().max() > 0.1, "the adapter does something"
    error = (merged.float()(IDS).logits - expected).abs().max()
    assert error < (1e-4 if dtype == "float32" else 0.1)


def test_a_full_model_by_the_command(make_checkpoint: Make, agentfactory: Command, tmp_path: Path) -> None:
    checkpoint, output = make_checkpoint(lora=False, dtype="bfloat16"), tmp_path / "model"
    result = agentfactory("export", str(checkpoint), "--output", str(output), status=0)
    assert result.stdout == f"exported {checkpoint} to {output}\n"
    assert names(output) == names(checkpoint) - {"training_state", "trainer_state.json", "digests.json"}
    assert (output / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    result = agentfactory("export", str(checkpoint), "--output", str(output), status=2)
    assert result.stderr == f"agentfactory: --output: {output} is not empty; fix: --output OTHER\n"


@pytest.mark.parametrize(("lora", "stages"), [(False, ()), (True, ("sft", "grpo"))])
def test_the_last_checkpoint_of_a_run(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool, stages: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint, said = make_checkpoint(lora=lora), []
    run = Path("run")
    RunFolder.create(run, yaml.safe_dump({"stages": [{"name": name} for name in stages]} if stages else {"name": "a"}))
    parts = [run / name for name in stages] or [run]
    for part in parts[: len(stages)]:
        RunFolder.create(part, "name: a")
    refused(run, tmp_path / "out", rf"{parts[-1]}/checkpoints holds no checkpoint; fix: run `agentfactory train`")
    for part in parts[:-1]:
        shutil.copytree(checkpoint, part / "checkpoints" / "step-000090")
        refused(run, tmp_path / "out", rf"grpo/checkpoints holds no checkpoint; fix: name an earlier stage, {part}")
    for step in (7, 10):
        shutil.copytree(checkpoint, parts[-1] / "checkpoints" / f"step-{step:06d}")
    last = parts[-1] / "checkpoints" / "step-000010"
    for number, named in enumerate((run, run / "recipe.yaml", parts[-1], parts[-1] / "checkpoints", last)):
        export(named, tmp_path / f"out{number}", adapter=lora, push=None, say=said.append)
        assert said[-1] == f"exported {last} to {tmp_path}/out{number}"
    assert said[0] == f"the last checkpoint of run is {last}"
    assert len(said) == 9, "a checkpoint that is named is not announced"


def test_an_upload_that_fails_is_told(make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    output = tmp_path / "model"
    told = rf"--push me/thing: HF_HUB_OFFLINE is set; .*; {output} is written"
    refused(make_checkpoint(lora=False), output, told, push="me/thing")
    assert (output / "model.safetensors").exists()


def test_what_cannot_be_exported(make_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(lora=False)
    refused(tmp_path / "nothing", tmp_path / "out", r"nothing does not exist; fix: name a run")
    refused(tmp_path / "base", tmp_path / "out", r"base is not a checkpoint; fix: name a run")
    refused(checkpoint, tmp_path / "out", r"--adapter: .* holds a full model; fix: leave it out", adapter=True)
    (checkpoint / "config.json").write_text("{}")
    refused(checkpoint, tmp_path / "out", r"step-000007 is damaged: config\.json")
    shutil.rmtree(checkpoint)
    adapter = make_checkpoint(lora=True)
    (tmp_path / "base").rename(tmp_path / "moved")
    refused(adapter, tmp_path / "out", r"adapter for .*base, which does not exist; fix: move or link it there")
    kept = {name: (adapter / name).read_text() for name in (INFO, DIGESTS)}
    (adapter / INFO).write_text("{}")
    (adapter / DIGESTS).write_text(json.dumps({**json.loads(kept[DIGESTS]), INFO: digest(adapter / INFO)}))
    refused(adapter, tmp_path / "out", r"its base model cannot be read", adapter=True)
    for name, text in kept.items():
        (adapter / name).write_text(text)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    refused(adapter, tmp_path / "out", r"cannot be merged into its base .*; fix: put the base back, or --adapter")
    assert not list(tmp_path.glob("*out*"))
