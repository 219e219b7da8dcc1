"""A run folder may be moved or copied: nothing in it decides by the path that it had."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from agentfactory.launching.run_folder import RunFolder, RunFolderError, base_of_adapter, check_free
from agentfactory.recipe.load import load_recipe
from tests.conftest import QUICKSTART
from tests.project import Command

EVAL = (
    "adapter.eval={data: {path: '${prepared}/heldout.jsonl', limit: 2}, greedy: false}",
    "adapter.server.engine=embedded",
    *(f"adapter.tools=[{QUICKSTART}/treasure_hunt.py:TreasureHunt]", "adapter.server.max_model_len=512"),
    *("adapter.rollout.max_tokens=8", "adapter.rollout.max_total_tokens=200"),
)


def digests(folder: Path) -> dict[str, str]:
    """The content and mode of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        f"{path.relative_to(folder)} {path.stat().st_mode:o}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_moved_run_goes_on_where_it_is_and_a_copy_leaves_it_alone(agentfactory: Command, tmp_path: Path) -> None:
    """Two stages, of which the second trains an adapter on the first one's checkpoint."""

    def done(*arguments: str) -> str:
        result = agentfactory(*arguments)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    stages = f"[{QUICKSTART}/sft.yaml, {{extends: {QUICKSTART}/grpo.yaml, name: adapter}}]"
    (tmp_path / "both.yaml").write_text(f"prepare: {QUICKSTART}/prepare.py:prepare\nstages: {stages}\n")
    short = ("sft.train.steps=3", "adapter.model.lora.rank=2", "train.batch_size=2", "train.warmup_steps=0")
    old, new, copy = (tmp_path / name for name in ("old", "new", "copy"))
    done("train", str(tmp_path / "both.yaml"), f"output={old}", *short, "adapter.train.steps=1")
    files = [path for path in old.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}

    old.rename(new)
    summary = json.loads((new / "summary.json").read_text())
    assert summary["checkpoint"] == "adapter/checkpoints/step-000001"
    checkpoints = new / "adapter" / "checkpoints"
    said = done("train", str(new / "recipe.yaml"), "--resume", "adapter.train.steps=2")
    assert f"resumed: {checkpoints / 'step-000001'}" in said
    assert base_of_adapter(checkpoints / "step-000002") == str(new / "sft" / "checkpoints" / "step-000003")
    done("eval", str(new / "recipe.yaml"), *EVAL)
    assert (new / "eval" / "summary.json").exists()
    # written before the move: peft says where the base was
    done("export", str(checkpoints / "step-000001"), "--output", str(tmp_path / "merged"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    done("view", str(new), "--export", str(tmp_path / "page.html"))
    assert not old.exists()

    before = digests(new)
    shutil.copytree(new, copy)
    done("train", str(copy / "adapter" / "recipe.yaml"), "--overwrite", "train.steps=1")
    assert [path.name for path in (copy / "adapter" / "checkpoints").iterdir()] == ["step-000001"]
    assert base_of_adapter(copy / "adapter" / "checkpoints" / "step-000001").startswith(str(copy / "sft"))
    assert digests(new) == before


def test_paths_of_a_saved_recipe_are_below_its_file(project: Path) -> None:
    output = project / "runs" / "both"
    (project / "make.py").write_text("def make(folder, seed): ...\n")
    text = (project / "recipe.yaml").read_text()
    (project / "first.yaml").write_text(text.replace("path: model", "path: '${prepared}/model'"))
    (project / "second.yaml").write_text("extends: first.yaml\n")
    (project / "both.yaml").write_text("prepare: make.py:make\nstages: [first.yaml, second.yaml]")
    whole = load_recipe("both.yaml")
    stage = whole.stages[1].with_model(str(output / "first" / "checkpoints" / "step-000010"))
    RunFolder.create(output, whole.to_saved())
    (output / "prepared" / "model").mkdir(parents=True)
    folder = RunFolder.create(stage.output, stage.to_saved(output))
    Path(stage.model.path).mkdir(parents=True)
    assert folder.whole == RunFolder(folder.path / "eval").whole == output
    for saved in (output, folder.path):
        assert str(output) not in (saved / "recipe.yaml").read_text()
    assert yaml.safe_load((folder.path / "recipe.yaml").read_text())["model"]["path"].startswith("${here}/../first/")
    assert load_recipe(output / "recipe.yaml") == whole
    assert load_recipe(folder.path / "recipe.yaml") == stage

    moved = project / "elsewhere"
    output.rename(moved)
    assert load_recipe(moved / "recipe.yaml").output == moved
    again = load_recipe(moved / "second" / "recipe.yaml")
    assert again.output == moved / "second"
    assert again.model.path == str(moved / "first" / "checkpoints" / "step-000010")
    # another output takes along what is prepared, and not what other stages have made
    other = load_recipe(moved / "second" / "recipe.yaml", ["output=other"])
    assert (other.output, other.model.path) == (project / "other", again.model.path)


def test_a_saved_recipe_taken_out_of_its_run_overwrites_nothing(project: Path) -> None:
    recipe = load_recipe("recipe.yaml")
    folder = RunFolder.create(recipe.output, recipe.to_saved())
    shutil.copy(folder.recipe, project / "recipe.yaml")
    taken = load_recipe("recipe.yaml")
    assert taken.output == project
    with pytest.raises(RunFolderError, match="not a run folder, so --overwrite leaves it alone"):
        check_free(taken.output, overwrite=True)
