"""A run folder may be moved or copied: nothing in it decides by the path that it had. For whole runs see
test_adapter_stages.py."""

import shutil
from pathlib import Path

import pytest
import yaml

from agentfactory.launching.run_folder import RunFolder, RunFolderError, check_free
from agentfactory.recipe.load import load_recipe


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
