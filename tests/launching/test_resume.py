"""What a run is going to do, before it does any of it: stages, commands, what the trainer is given; which checkpoint it
goes on from, what must not change meanwhile, and what is cut."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory import train
from agentfactory.base.config import McpServerConfig
from agentfactory.base.errors import SettingError
from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code.source_files import digests_of
from agentfactory.commands.main import main
from agentfactory.launching.launch_plan import Assignment, RunPlan, StagePlan, State, plan_run, resume_stages
from agentfactory.launching.placement import Placement
from agentfactory.launching.resumption import changed_code, code_files, content_digests, rewind
from agentfactory.launching.run_folder import RunFolder, RunFolderError
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.groups.group_files import CREDIT_FILE
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoint_path, checkpoints, written_aside
from agentfactory.trainers.config import ACCELERATE, PORTLESS_ENVIRONMENT


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("recipe.yaml", ["train.steps=40", *overrides])


def write_checkpoint(folder: RunFolder, recipe: Recipe, step: int) -> Path:
    """Lines of two steps come before each checkpoint, of each growing file."""
    for number in (step - 1, step):
        # a second worker, in the last part of the run
        names = ["train.jsonl", CREDIT_FILE] + (["train-1.jsonl"] if number > 4 else [])
        for file in [folder.metrics, *(folder.trajectories / name for name in names)]:
            with file.open("a") as lines:
                lines.write(json.dumps({"step": number, "text": "ä" * 50}) + "\n")
    path = checkpoint_path(folder.checkpoints, step)
    with written_aside(path) as aside:
        sizes = {name: file.stat().st_size for name, file in folder.growing().items()}
        info = {"step": step, "recipe": yaml.safe_load(recipe.to_yaml()), "files": sizes}
        (aside / "trainer_state.json").write_text(json.dumps(info))
    return path


@pytest.fixture
def run(project: Path) -> RunFolder:
    """A run of `recipe.yaml` that was killed after its third checkpoint, in step 7."""
    recipe = recipe_of()
    folder = RunFolder.create(recipe.output, recipe.to_yaml())
    for step in (2, 4, 6):
        write_checkpoint(folder, recipe, step)
    for file in folder.growing().values():
        with file.open("a") as lines:
            lines.write('{"step": 7}\n{"st')
    (folder.checkpoints / ".step-000008.partial").mkdir()
    return folder


def resumed(*overrides: str, asked: str = "auto") -> StagePlan:
    (part,) = resume_stages([recipe_of(*overrides)], asked)
    return part


def refused(told: str, *overrides: str, asked: str = "auto") -> None:
    with pytest.raises((SettingError, RunFolderError), match=told):
        resumed(*overrides, asked=asked)


def lines(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_from_the_newest_checkpoint(run: RunFolder) -> None:
    part = resumed()
    assert (part.state, part.checkpoint) == (State.STARTED, run.checkpoints / "step-000006")
    said: list[str] = []
    rewind(recipe_of(), run, part.checkpoint, said.append)
    assert said == [f"resumed: {run.checkpoints / 'step-000006'}"]
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []
    names = ["metrics.jsonl", "trajectories/credit.jsonl", "trajectories/train-1.jsonl", "trajectories/train.jsonl"]
    assert list(run.growing()) == names
    for name, file in run.growing().items():
        assert lines(file) == list(range(5 if name == "trajectories/train-1.jsonl" else 1, 7))


def test_from_an_earlier_one_later_ones_are_set_aside(run: RunFolder) -> None:
    for attempt, aside in ((1, "set-aside"), (2, "set-aside-2")):
        part = resumed(asked=str(run.checkpoints / "step-000002"))
        said: list[str] = []
        rewind(recipe_of(), run, part.checkpoint, said.append)
        assert said[0] == f"later checkpoints are set aside: {'step-000004, ' * (attempt == 1)}step-000006 in " + str(
            run.checkpoints / aside
        )
        assert [path.name for path in checkpoints(run.checkpoints)] == ["step-000002"]
        for file in run.growing().values():
            assert lines(file) == ([] if file.name == "train-1.jsonl" else [1, 2])
        write_checkpoint(run, recipe_of(), 6)


def test_where_no_checkpoint_is_it_begins_again(run: RunFolder) -> None:
    for path in checkpoints(run.checkpoints):
        path.rename(run.path / path.name)
    part = resumed()
    assert (part.state, part.checkpoint) == (State.STARTED, None)
    rewind(recipe_of(), run, None, [].append)
    assert [file.read_text() for file in run.growing().values()] == [""] * 4
    refused(r"seed: got 1, but .*recipe\.yaml was trained with 0", "seed=1")


def test_a_damaged_checkpoint_is_told_and_the_one_before_offered(run: RunFolder) -> None:
    for step in (6, 4):
        (run.checkpoints / f"step-{step:06d}" / "trainer_state.json").write_text("{}")
    before = r"--resume runs/recipe/checkpoints/step-000002"
    refused(rf"step-000006 is damaged: trainer_state.json .*; fix: {before}$")
    (run.checkpoints / "step-000002" / "trainer_state.json").unlink()
    refused(r"none before it is intact: start again with --overwrite$")


def test_a_path_that_is_none_of_its_checkpoints(run: RunFolder, project: Path) -> None:
    refused(r"model is not a checkpoint of the run; fix: name one in runs/recipe/", asked=str(project / "model"))
    refused(r"step-000005 is not a checkpoint; fix: name one in", asked=str(run.checkpoints / "step-000005"))


@pytest.mark.parametrize(
    "override",
    ["train.steps=80", "train.processes=2 train.strategy=ddp", "rollout.timeout_seconds=99", "server.max_num_seqs=5"],
)
def test_what_may_change(run: RunFolder, override: str) -> None:
    assert resumed(*override.split()).checkpoint


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learning_rate=3e-5", "train.learning_rate: got 3e-05, but .*step-000006 was trained with 1e-05"),
        ("model.lora.rank=4", r"model\.lora.*: got .* trained without it"),
        ("seed=3", "seed: got 3"),
        ("train.steps=5", "train.steps: got 5, but .*step-000006 has more; fix: raise it"),
    ],
)
def test_what_must_not_change(run: RunFolder, override: str, said: str) -> None:
    refused(said, override)


def change_info(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    info = json.loads((path / "trainer_state.json").read_text())
    change(info)
    (path / "trainer_state.json").write_text(json.dumps(info))
    digests = json.loads((path / "digests.json").read_text())
    digests["trainer_state.json"] = hashlib.sha256((path / "trainer_state.json").read_bytes()).hexdigest()
    (path / "digests.json").write_text(json.dumps(digests))


def change_saved_recipes(run: RunFolder, change: Callable[[dict[str, Any]], None]) -> None:
    for path in checkpoints(run.checkpoints):
        change_info(path, lambda info: change(info["recipe"]))


def test_data_with_other_content_is_refused(run: RunFolder, project: Path) -> None:
    recipe = recipe_of()
    assert resume_stages([recipe], "auto")[0].checkpoint
    contents = content_digests(recipe)
    assert [*contents] == ["data.path"]
    for path in checkpoints(run.checkpoints):
        change_info(path, lambda info: info.update(contents=contents))
    assert resume_stages([recipe], "auto")[0].checkpoint
    with (project / "tasks.jsonl").open("a") as file:
        file.write('{"question": "another"}\n')
    problem = r"--resume: data\.path: tasks\.jsonl has another content than when .*step-000006"
    with pytest.raises(SettingError, match=f"{problem}.*; fix: restore the file, or begin another run"):
        resume_stages([recipe], "auto")


def test_changed_code_of_tools_and_rewards_is_named(run: RunFolder, project: Path) -> None:
    """Whether a change matters, only a person can say: it may correct a comment or what a reward means."""
    (project / "helper.py").write_text("import deeper\n")
    (project / "deeper.py").write_text("")
    (project / "server.py").write_text("")
    with (project / "my_tools.py").open("a") as file:
        file.write("\nimport helper, json\nfrom agentfactory import tool\n")
    recipe = recipe_of()
    server = McpServerConfig.model_validate({"command": "python", "args": ["server.py"]})
    recipe = recipe.model_copy(update={"mcp_servers": {"own": server}})
    code = digests_of(code_files(recipe))
    assert {Path(path).name for path in code} == {"my_tools.py", "helper.py", "deeper.py", "server.py"}
    step_6 = run.checkpoints / "step-000006"
    assert list(changed_code(recipe, step_6)) == [], "a checkpoint of an earlier version"
    change_info(step_6, lambda info: info.update(code=code))
    assert list(changed_code(recipe, step_6)) == []
    (project / "deeper.py").write_text("import more\n")
    (project / "more.py").write_text("")
    (project / "server.py").write_text("pass\n")
    with (project / "my_tools.py").open("a") as file:
        file.write("# another\n")
    said: list[str] = []
    rewind(recipe, run, step_6, said.append)
    end = "since step 6: later chains are not comparable with earlier ones; fix: restore it, or begin another run with "
    assert said[:-1] == [
        f"warning: {name} {end}output=OTHER"
        for name in (
            "my_tools.py (tools) has changed",
            "server.py (mcp_servers.own.args) has changed",
            "deeper.py (imported by helper.py) has changed",
            "more.py (imported by deeper.py) is new",
        )
    ]


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        *(("isolation=shared", False), ("pool={warm: 4}", False), ("timeout_seconds=9", False)),
        *(("args=[--local]", True), ("options.isolation=shared", True)),
    ],
)
def test_the_operation_of_tools_may_change(run: RunFolder, override: str, refused: bool) -> None:
    options = {"module": "x.py:X"} if override.startswith("options") else {"command": "python"}
    server = McpServerConfig.model_validate(options)
    change_saved_recipes(run, lambda saved: saved["mcp_servers"].update(time=server.model_dump(mode="json")))
    field, _, value = override.partition("=")
    given = yaml.safe_load(value)
    given = {"options": {"isolation": given}} if field == "options.isolation" else {field: given}
    servers = {"time": McpServerConfig.model_validate(options | given)}
    recipe = recipe_of().model_copy(update={"mcp_servers": servers})
    if refused:
        with pytest.raises(SettingError, match=rf"--resume: mcp_servers\.time\.{field}: got .* was trained"):
            resume_stages([recipe], "auto")
    else:
        assert resume_stages([recipe], "auto")[0].checkpoint


def test_a_run_from_before_a_field_came_goes_on_as_it_was_trained(run: RunFolder) -> None:
    def remove(saved: dict[str, Any]) -> None:
        del saved["train"]["loss"]["behaviour_kl"], saved["train"]["advantage"]["malformed_turns"]

    change_saved_recipes(run, remove)
    refused(r"malformed_turns: got 'blamed', but .* was trained with 'like_others'")
    as_before = ("train.loss.behaviour_kl=0", "train.advantage.malformed_turns=like_others")
    assert resumed(*as_before).state is State.STARTED


def test_a_completed_run_goes_on_only_for_more_steps(run: RunFolder) -> None:
    run.write_summary({"status": "completed", "steps": 40})
    refused(r"runs/recipe is completed, with 40 steps; fix: raise train.steps")
    assert resumed("train.steps=50").state is State.STARTED
    assert resumed(asked=str(run.checkpoints / "step-000004")).state is State.STARTED


def test_stages(run: RunFolder) -> None:
    first = recipe_of()
    second = recipe_of("output=runs/second", f"model.path={run.checkpoints}/step-000006")
    third = recipe_of("output=runs/third")
    run.write_summary({"status": "completed", "steps": 40})
    folder = RunFolder.create(second.output, second.to_yaml())
    assert [part.state for part in resume_stages([first, second, third], "auto")] == ["completed", "started", "new"]
    own = write_checkpoint(folder, second, 2)
    parts = resume_stages([first, recipe_of("output=runs/second"), third], "auto")
    assert [part.checkpoint for part in parts] == [run.checkpoints / "step-000006", own, None]
    with pytest.raises(RunFolderError, match=r"runs/second: stage recipe has begun, but the stage before it is not"):
        resume_stages([recipe_of("train.steps=50"), second], "auto")
    with pytest.raises(RunFolderError, match=r"runs/second: stage recipe has begun"):
        resume_stages([first, second], str(run.checkpoints / "step-000004"))


# ---- the plan


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


def test_an_assignment_is_for_the_launchers_own(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
