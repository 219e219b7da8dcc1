"""A run folder's layout, and what protects what is in it."""

import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import yaml

from agentfactory.base.files.disk import DiskError
from agentfactory.launching.run_folder import RunFolder, RunFolderError, check_free
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.groups.group_files import append_group, arrays_file, read_groups
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory


def test_layout_and_metrics(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "name: x\n")
    seen: list[dict] = []
    folder.on_log = seen.append
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "logs", "recipe.yaml", "trajectories"]
    folder.log({"step": 1, "loss": 0.5})
    folder.log({"step": 2, "loss": 0.25})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == seen
    assert list(folder.read_metrics()) == seen
    folder.metrics.write_text(folder.metrics.read_text() + '{"step": 3, "lo')
    assert list(folder.read_metrics()) == seen


def test_the_last_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    assert folder.last_checkpoint() is None
    for step in ("step-000009", "step-1000000", "step-000100", ".step-2000000.partial"):
        (folder.checkpoints / step).mkdir()
    assert folder.last_checkpoint() == folder.checkpoints / "step-1000000"


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_begins_beside_what_other_commands_wrote(tmp_path: Path, keep: bool) -> None:
    output, names = tmp_path / "run", ("eval", "eval-2", "rollout", "serve")
    for name in names:
        RunFolder.create(output / name, "")
    for place in (tmp_path / "elsewhere", output / ".prepared.partial", output / "logs"):
        place.mkdir(parents=True)
    (output / "prepared").symlink_to(tmp_path / "elsewhere")
    (output / "logs" / "prepare.log").touch()
    folder = RunFolder.create(output, "a: 1\n", keep_prepared=keep)
    assert folder.recipe.read_text() == "a: 1\n"
    assert ((output / "prepared").is_symlink(), (tmp_path / "elsewhere").is_dir()) == (keep, True)
    assert all(RunFolder(output / name).recipe.is_file() for name in names)


@pytest.mark.parametrize("place", ["/proc/x/y", "/dev/null/y", "/sys/x"])
def test_a_place_that_cannot_be_written_is_named(place: str) -> None:
    with pytest.raises(RunFolderError, match=f"^output: {place[:9]}.*(is a|cannot be).*; fix: output=OTHER$"):
        check_free(Path(place), overwrite=False)
    with pytest.raises(RunFolderError, match="fix: output=OTHER"):
        RunFolder.create(Path(place), "")


def test_what_a_full_disk_does_not_take_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(
            DiskError,
            match=r"run/metrics\.jsonl cannot be written: File too large .*; fix: raise the limit of file sizes",
        ):
            folder.log({"step": 1})
        with pytest.raises(DiskError, match=r"credit\.jsonl cannot be written"):
            folder.note_credit(["{}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_a_run_is_overwritten_and_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    RunFolder.create(path, f"name: webshop-small\nimport_path: [{tmp_path}/webshop]\n")
    taken = f"output: {path} holds the run 'webshop-small' of the recipe in {tmp_path}/webshop; fix: output=OTHER for "
    with pytest.raises(RunFolderError, match=re.escape(taken) + r"another run, --resume .*, or --overwrite to delete"):
        RunFolder.create(path, "second")
    (path / "recipe.yaml").write_text("name: [")
    with pytest.raises(RunFolderError, match="holds a run; fix: "):
        RunFolder.create(path, "second")
    (path / "metrics.jsonl").write_text("{}\n")
    assert RunFolder.create(path, "second", overwrite=True).recipe.read_text() == "second"
    assert not (path / "metrics.jsonl").exists()
    (path / "recipe.yaml").unlink()
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder.create(path, "third", overwrite=True)


def test_only_a_run_is_reopened(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no run in .*; fix: leave out --resume"):
        RunFolder.reopen(tmp_path / "run", "second")
    RunFolder.create(tmp_path / "run", "first").write_summary({"status": "failed"})
    folder = RunFolder.reopen(tmp_path / "run", "second")
    assert folder.recipe.read_text() == "second"
    assert folder.read_summary() == {}


@pytest.mark.parametrize(("size", "left"), [(99, "one\ntwo\n"), (8, "one\ntwo\n"), (7, "one\n"), (3, "")])
def test_growing_files_are_cut_to_whole_lines(tmp_path: Path, size: int, left: str) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    folder.metrics.write_text("one\ntwo\nthr")
    folder.cut({"metrics.jsonl": size})
    assert folder.metrics.read_text() == left


def test_arrays_are_cut_with_their_lines(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    file = folder.trajectories / "train.jsonl"
    chain = Trajectory("g.0", [], [Row([10, 7], [0, 1], [0.0, -0.5])], Outcome.COMPLETED)
    groups = [Group(name, {}, [chain]) for name in ("g0", "g1", "g2")]
    append_group(file, groups[0])
    append_group(file, groups[1])
    sizes = {name: path.stat().st_size for name, path in folder.growing().items()}
    assert list(sizes) == ["trajectories/train.jsonl", "trajectories/train.arrays"], "a line first, then its arrays"
    append_group(file, groups[2])
    # killed before its line
    append_group(tmp_path / "other.jsonl", groups[2])
    with arrays_file(file).open("ab") as arrays:
        arrays.write(arrays_file(tmp_path / "other.jsonl").read_bytes()[:-1])
    folder.cut(sizes)
    assert {name: path.stat().st_size for name, path in folder.growing().items()} == sizes
    append_group(file, groups[2])
    assert list(read_groups(file)) == groups
    # a checkpoint of 0.1 knows no arrays
    folder.cut({"trajectories/train.jsonl": 0})
    assert arrays_file(file).stat().st_size == 0


def test_it_tells_whether_the_trainer_is_finishing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    assert not folder.is_finishing()
    folder.note_stopping()
    assert folder.is_finishing()
    folder.note_stopped()
    assert not folder.is_finishing()
    (folder.checkpoints / ".step-000002.partial").mkdir()
    assert folder.is_finishing()


# moved or copied; for whole runs see test_adapter_stages.py


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
