"""What a run is going to do, before it does any of it: stages, commands, what the trainer is given."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from agentfactory import train
from agentfactory.base.errors import SettingError
from agentfactory.base.processes import parent_watch
from agentfactory.commands.main import main
from agentfactory.launching.launch_plan import Assignment, RunPlan, StagePlan, State, plan_run
from agentfactory.launching.placement import Placement
from agentfactory.launching.run_folder import RunFolder
from agentfactory.recipe.load import load_recipe
from agentfactory.trainers.config import ACCELERATE, PORTLESS_ENVIRONMENT
from tests.launching.test_resume import recipe_of, write_checkpoint


@pytest.fixture
def two_stages(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("agentfactory.base.processes.devices.GPU_DRIVERS", ())
    recipe = yaml.safe_load((project / "recipe.yaml").read_text())
    for name in ("first", "second"):
        (project / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "name": name}))
    (project / "both.yaml").write_text("stages: [first.yaml, second.yaml]\n")
    return project / "runs" / "both"


def planned(*overrides: str, resume: str | None = None) -> RunPlan:
    return plan_run(load_recipe("both.yaml", ["train.steps=40", *overrides]), resume)


def test_every_stage_but_the_first_trains_the_checkpoint_of_the_one_before(two_stages: Path) -> None:
    first, second = planned("first.train.steps=7").stages
    assert (first.state, second.state) == (State.NEW, State.NEW)
    assert second.recipe.model.path == str(two_stages / "first" / "checkpoints" / "step-000007")
    assert not two_stages.exists(), "a plan writes nothing"
    after_adapter = planned("first.model.lora.rank=2").stages[1]
    assert after_adapter.merge.reason == "second trains all weights"
    assert after_adapter.recipe.model.path == str(after_adapter.merge.output)


def test_a_completed_stage_is_not_due_and_gives_the_checkpoint_that_it_has(two_stages: Path) -> None:
    two_stages.mkdir(parents=True)
    (two_stages / "recipe.yaml").touch()
    stage = planned().stages[0].recipe
    folder = RunFolder.create(stage.output, stage.to_yaml())
    write_checkpoint(folder, stage, 40)
    folder.write_summary({"status": "completed", "steps": 40})
    plan = planned(resume="auto")
    assert [part.state for part in plan.stages] == [State.COMPLETED, State.NEW]
    assert [part.recipe.name for part in plan.due] == ["second"]
    assert plan.due[0].recipe.model.path == str(stage.output / "checkpoints" / "step-000040")


def test_the_trainer_is_given_the_whole_recipe(project: Path, tmp_path: Path) -> None:
    recipe = recipe_of()
    placement = Placement(mode="split", on_gpu=True, trainer_devices="1", sync="ipc")
    stage = StagePlan(recipe, RunFolder(recipe.output), checkpoint=tmp_path / "step-000002").placed(placement)
    assignment = stage.assignment("http://127.0.0.1:7000")
    assignment.write(tmp_path / "assignment.json")
    read = Assignment.wait_for(tmp_path / "assignment.json")
    assert read == assignment
    given = read.recipe.model_dump()
    assert given["server"].pop("url") == "http://127.0.0.1:7000"
    assert (given["placement"].pop("mode"), given["sync"].pop("backend")) == ("split", "ipc")
    asked = recipe.model_dump()
    for section, field in (("server", "url"), ("placement", "mode"), ("sync", "backend")):
        del asked[section][field]
    assert given == asked
    assert stage.trainer.env == {"CUDA_VISIBLE_DEVICES": "1"}
    # a server that runs already keeps its address
    attached = recipe_of("server.url=http://127.0.0.1:7001")
    stage = StagePlan(attached, RunFolder(recipe.output)).placed(Placement())
    assert stage.server is None
    assert stage.assignment(None).recipe == attached


def test_the_commands_of_several_processes(two_stages: Path) -> None:
    stage = planned("train.processes=2", "train.strategy=fsdp2").stages[0]
    command = stage.trainer.arguments
    assert command[0] == sys.executable
    assert str(ACCELERATE / "fsdp2.yaml") in command
    assert command[-4:] == ["-m", "agentfactory.train", "--assignment", str(two_stages / "first" / "assignment.json")]
    expected = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", "ACCELERATE_USE_CPU": "true", **PORTLESS_ENVIRONMENT}
    assert stage.trainer.env == expected


def test_a_dry_run_prints_the_plan(two_stages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        assert main(["train", *arguments, "--dry-run"]) == 0
        return capsys.readouterr().out

    plan = printed("both.yaml")
    assert len(yaml.safe_load(plan)["stages"]) == 2
    lines = [line for line in plan.splitlines() if line.startswith("#")]
    lines = [line for line in lines if not line.startswith("# warning: train.batch_size: got 8, more than the rows")]
    assert lines[0] == "# first: new, in runs/both/first"
    (server,) = [line for line in lines if line.startswith("# second: server: ")]
    assert f"agentfactory.rollout.inference.embedded {two_stages}/first/checkpoints/step-" in server
    assert f"# second: trainer: {sys.executable} " in lines[-1]
    assert lines[-1].endswith(f"-m agentfactory.train --assignment {two_stages}/second/assignment.json")
    assert not two_stages.exists()
    # a folder that is taken is said, and is no fault of the recipe
    recipe = load_recipe("first.yaml")
    folder = RunFolder.create(recipe.output, recipe.to_yaml())
    write_checkpoint(folder, recipe, 2)
    told = f"# would be refused: output: {recipe.output} holds the run 'first' of the recipe in "
    assert printed("first.yaml").splitlines()[-1].startswith(told)
    assert "# first: started, in runs/first, resumes from runs/first/checkpoints/step-000002" in printed(
        "first.yaml", "--resume"
    )
    assert json.loads((folder.checkpoints / "step-000002" / "trainer_state.json").read_text())["step"] == 2


def test_an_assignment_is_for_the_launchers_processes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=r"--assignment: it is for processes .*, without other arguments"):
        train.parse(["--assignment", str(tmp_path / "a.json"), "train.steps=4"])
    recipe = recipe_of()
    stage = StagePlan(recipe, RunFolder(recipe.output)).placed(Placement())
    stage.assignment("http://127.0.0.1:7000").write(tmp_path / "a.json")
    monkeypatch.delenv(parent_watch.VARIABLE, raising=False)
    with pytest.raises(SettingError, match="--assignment: it is for processes that `agentfactory train` starts"):
        train.parse(["--assignment", str(tmp_path / "a.json")])
    monkeypatch.setenv(parent_watch.VARIABLE, "1:0")
    assert train.load(train.parse(["--assignment", str(tmp_path / "a.json")]))[0].server.url == "http://127.0.0.1:7000"
