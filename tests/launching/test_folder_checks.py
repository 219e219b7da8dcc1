"""Commands on run folders that somebody else has filled: refused in a line that names the file, before it is opened."""

import json
import os
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.commands.export_command import export
from agentfactory.commands.main import main
from agentfactory.launching.run_folder import Hold, RunFolder, RunFolderError
from agentfactory.launching.served_weights import check_weights_folder
from agentfactory.trainers.checkpoints.checkpoint_folder import (
    INFO,
    DamagedCheckpointError,
    checkpoints,
    verify,
    written_aside,
)

SECRET = "of-another-user-7731"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    made = tmp_path / "private"
    made.write_text(SECRET)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "model: {path: nowhere}\ntrain: {steps: 1}\n")
    made.log({"step": 1})
    with written_aside(made.checkpoints / "step-000001") as aside:
        (aside / INFO).write_text(json.dumps({"step": 1, "recipe": {}}))
        (aside / "config.json").write_text("{}")
    return made


def put(place: Path, kind: str, private: Path) -> None:
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(private)
    else:
        os.mkfifo(place)


_WRITTEN = (
    *("recipe.yaml", "summary.json.new", "images", "logs/train.log", "trajectories/train.jsonl", "sync"),
    "checkpoints/step-000001/config.json",
)


@pytest.mark.parametrize(
    ("command", "name", "kind"),
    [
        *(("train --resume", name, "link") for name in _WRITTEN),
        *(("train --resume", name, "fifo") for name in ("metrics.jsonl", "logs/train.log")),
        *((each, "summary.json", "link") for each in ("eval", "serve", "rollout")),
    ],
)
def test_a_run_with_links_is_refused_and_nothing_is_written_through_them(
    command: str, name: str, kind: str, run: RunFolder, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run.path / name, kind, private)
    first, *rest = command.split()
    assert main([first, str(run.recipe), *rest]) == 2
    told = capsys.readouterr().err
    assert f"{run.path / name} is a {'link, which' if kind == 'link' else 'FIFO'}" in told
    assert "; fix: " in told
    assert private.read_text() == SECRET


def test_a_short_file_of_very_many_values_is_refused(run: RunFolder) -> None:
    (checkpoint,) = checkpoints(run.checkpoints)
    (checkpoint / INFO).write_text('{"x": [' + "[]," * (6 << 20) + "[]]}")
    with pytest.raises(RunFolderError, match=rf"{INFO} has more than 4,194,304 values; fix: "):
        check_weights_folder(checkpoint)


def test_a_run_without_logs_is_checked_too(run: RunFolder, private: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.logs.rmdir()
    put(run.summary, "link", private)
    assert main(["eval", str(run.recipe)]) == 2
    assert f"{run.summary} is a link" in capsys.readouterr().err


def test_an_export_has_only_what_was_written(run: RunFolder, tmp_path: Path) -> None:
    (checkpoint,) = checkpoints(run.checkpoints)
    (checkpoint / "sparse").touch()
    os.truncate(checkpoint / "sparse", 60 << 30)
    export(checkpoint, tmp_path / "out", adapter=False, push=None, say=print)
    assert os.listdir(tmp_path / "out") == ["config.json"]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_the_lock_of_a_run_is_never_written_through_a_link(kind: str, run: RunFolder, private: Path) -> None:
    put(run.path / ".lock", kind, private)
    with pytest.raises(RunFolderError, match="; fix: "), Hold(run.path) as hold:
        hold.take(make=True)
    assert private.read_text() == SECRET


def test_what_replaces_a_file_goes_through_no_link(run: RunFolder, private: Path) -> None:
    put(run.path / "summary.json.new", "link", private)
    put(run.summary, "link", private)
    run.write_summary({"steps": 1})
    assert run.read_summary() == {"steps": 1}
    assert private.read_text() == SECRET


@pytest.mark.parametrize(
    ("name", "kind"), [("extra.bin", "link"), ("config.json", "fifo"), ("digests.json", "link"), (INFO, "fifo")]
)
def test_checkpoints_have_no_links(name: str, kind: str, run: RunFolder, private: Path, tmp_path: Path) -> None:
    (checkpoint,) = checkpoints(run.checkpoints)
    verify(checkpoint)
    check_weights_folder(checkpoint)
    put(checkpoint / name, kind, private)
    with pytest.raises((SettingError, RunFolderError), match=rf"{checkpoint / name} is a (link|FIFO).*; fix: "):
        export(checkpoint, tmp_path / "out", adapter=False, push=None, say=print)
    with pytest.raises(DamagedCheckpointError, match=f"{name} is a (link|FIFO)"):
        verify(checkpoint)
    with pytest.raises(RunFolderError, match="; fix: "):
        check_weights_folder(checkpoint)


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-000001"])
def test_a_folder_of_checkpoints_that_is_a_link_is_refused(part: str, run: RunFolder, tmp_path: Path) -> None:
    (run.path / part).rename(tmp_path / "elsewhere")
    (run.path / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=f"{run.path / part} is a link"):
        run.last_checkpoint()
    with pytest.raises((SettingError, RunFolderError), match=f"{run.path / part} is a link"):
        export(run.checkpoints / "step-000001", tmp_path / "out", adapter=False, push=None, say=print)
    # the run itself may be reached by a link
    (run.path / part).unlink()
    (tmp_path / "elsewhere").rename(run.path / part)
    (tmp_path / "by-link").symlink_to(run.path)
    check_weights_folder(tmp_path / "by-link" / "checkpoints" / "step-000001")
    assert RunFolder(tmp_path / "by-link").last_checkpoint() is not None


def test_digests_name_nothing_outside_of_their_checkpoint(run: RunFolder, private: Path) -> None:
    (checkpoint,) = checkpoints(run.checkpoints)
    for name in (str(private), "../../../private", "", "\0"):
        (checkpoint / "digests.json").write_text(json.dumps({name: "0"}))
        with pytest.raises(DamagedCheckpointError, match=r"is damaged: (?!.*does not match its digest)"):
            verify(checkpoint)


def test_a_model_may_have_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blob, model = tmp_path / "blob", tmp_path / "model"
    blob.write_text("{}")
    model.mkdir()
    (model / "config.json").symlink_to(blob)
    check_weights_folder(model)
    os.mkfifo(model / "tokenizer.json")
    with pytest.raises(RunFolderError, match=r"tokenizer\.json is a FIFO; fix: "):
        check_weights_folder(model)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: &a [*a]", "\xff", "x: " + "y" * (1 << 20)])
def test_a_recipe_that_fills_memory_is_refused(text: str, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.recipe.write_bytes(text.encode("latin-1"))
    for command in (["eval", str(run.recipe)], ["train", str(run.recipe), "--resume"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "recipe.yaml" in told
        assert "Traceback" not in told
