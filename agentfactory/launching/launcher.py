"""Execute the plan of `agentfactory train`: prepare, start each stage's server and trainer, and end them all."""

import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import DiskError
from agentfactory.launching.child_processes import ChildFailed, Children
from agentfactory.launching.launch_plan import Machines, RunPlan, StagePlan, State, plan_run
from agentfactory.launching.prepare import run_prepare
from agentfactory.launching.progress import tell_information
from agentfactory.launching.reach_early import check_hub, check_reach
from agentfactory.launching.resumption import rewind
from agentfactory.launching.run_folder import ADAPTER, Hold, RunFolder, RunFolderError, check_free
from agentfactory.launching.run_results import best_checkpoint, check_dropped, conclude, draw_curve
from agentfactory.launching.start_server import begin_server, wait_for_server
from agentfactory.launching.time_plan import TimePlan
from agentfactory.recipe.checks import check_prepared, doubts
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of
from agentfactory.rollout.inference.server_command_line import address_fault, outside_fault

Say = Callable[[str], None]


class RunStopped(Exception):
    """A symptom of train.stop_when has ended the run; the message names it and the best checkpoint."""

    def __init__(self, reason: str, best: list[str]) -> None:
        super().__init__("; ".join([reason, *best]))
        self.reason = reason


def train(
    recipe: Recipe | StagedRecipe, overwrite: bool, resume: str | None, say: Say, machines: Machines | None = None
) -> None:
    """Run all stages and write the run folder; `resume` is a checkpoint or AUTO. Raises ChildFailed, RunStopped,
    MostChainsDroppedError, RunFolderError, PlacementError, SettingError, KeyboardInterrupt."""
    with Hold(recipe.output) as hold:
        hold.take()
        if overwrite and "${output}/" in recipe.to_yaml():
            problem = f"the recipe reads files in {recipe.output}, which --overwrite would delete"
            raise RunFolderError(f"output: {problem}; fix: output=OTHER")
        if resume is None:
            check_free(recipe.output, overwrite)
        check_hub(recipe, "train")
        plan = plan_run(recipe, resume, overwrite, machines)
        # a stage that cannot be placed is refused before anything is written, if its model already exists
        for stage in plan.due:
            if stage.refusal is not None:
                _tell(stage, say)
            if stage.recipe.train.strategy == "hsdp" and stage.machines.count == 1:
                problem, fix = "got 'hsdp', and this command trains on one machine", "docs/multi-node.md, or use fsdp2"
                raise SettingError("train.strategy", problem, fix)
            if stage.server is not None and (taken := address_fault(stage.recipe)) is not None:
                raise taken
            if (taken := outside_fault(stage.recipe)) is not None:
                raise taken
            model = Path(stage.recipe.model.path)
            # the trainer reports what an adapter's folder lacks
            if model.is_dir() and not any((model / name).is_file() for name in ("config.json", ADAPTER)):
                problem = f"{display(model)} has no config.json"
                raise SettingError("model.path", problem, "name a folder with a model, or a hub name")
            if plan.prepare is None:
                with tell_information(say):
                    check_reach(stage.recipe, servers=stage.machines.during is None)
        folder = _open_folder(plan, overwrite, resume, hold)
        try:
            with tempfile.TemporaryDirectory(prefix="agentfactory-launch-") as private, Children(say) as children:
                _run_stages(plan, folder, children, Path(private), say)
        except BaseException as error:
            # on a full disk, the terminal shows the cause
            with suppress(DiskError):
                statuses = {KeyboardInterrupt: "interrupted", RunStopped: "stopped"}
                status = next((name for kind, name in statuses.items() if isinstance(error, kind)), "failed")
                reason = error.reason if isinstance(error, RunStopped) else str(error) or "Ctrl-C"
                noted = {"status": status, "reason": reason, "seed": recipe.seed}
                folder.write_summary({**folder.read_summary(), **noted})
                for stage in plan.stages if isinstance(error, KeyboardInterrupt) else ():
                    # our SIGTERM ended its trainer, because of `error`
                    if (summary := stage.folder.read_summary()).get("reason") == "SIGTERM":
                        stage.folder.write_summary({**summary, "reason": str(error) or "Ctrl-C"})
            raise
        last = plan.stages[-1].folder
        summary = {**folder.read_part(last), "status": "completed"}
        folder.write_summary(summary)
        try:
            curve = draw_curve(last.read_metrics(), folder.path / "curve.png", recipe.name)
        except SettingError as error:
            curve = None
            say(f"no curve.png: {error}")
        stages = [(stage.recipe.name, stage.folder.read_summary()) for stage in plan.stages]
        # repeat the warnings of earlier stages; those of the last stage stand right above
        for line in [f"stage {name}: {text}" for name, found in stages[:-1] for text in found.get("warnings", ())]:
            say(line)
        for line in conclude(recipe.name, summary, folder.path, curve):
            say(line)
        check_dropped(found for _, found in stages)


def _open_folder(plan: RunPlan, overwrite: bool, resume: str | None, hold: Hold) -> RunFolder:
    hold.take()
    if overwrite:
        # NFS cannot delete a folder with an open file in it
        hold.release()
    path = plan.recipe.output
    # that of a single stage has the model that is trained
    text = (plan.recipe if isinstance(plan.recipe, StagedRecipe) else plan.stages[0].recipe).to_saved()
    folder = RunFolder.create(path, text, overwrite) if resume is None else RunFolder.reopen(path, text)
    hold.take(make=True)
    return folder


def _run_stages(plan: RunPlan, whole: RunFolder, children: Children, private: Path, say: Say) -> None:
    run_prepare(plan.recipe, children, say)
    if plan.recipe.prepare is not None:
        for stage in plan.due:
            check_prepared(stage.recipe, plan.recipe.output / "prepared", is_first=stage is plan.stages[0])
    if plan.prepare is not None:
        for stage in plan.due:
            with tell_information(say):
                check_reach(stage.recipe, servers=stage.machines.during is None)
    # as they were given: that of a merged model no longer names the adapter
    for recipe, stage in zip(stages_of(plan.recipe), plan.stages, strict=True):
        for doubt in doubts(recipe) if stage.state is not State.COMPLETED else ():
            say(f"warning: {doubt}")
    # place stages whose model has just been created
    plan = plan.placed()
    for number, stage in enumerate(plan.stages, 1):
        # again for each stage, whose model is then known
        time = plan.times()[number - 1]
        if len(plan.stages) > 1:
            say(f"stage {number} of {len(plan.stages)}: {stage.recipe.name} ({stage.state})")
        if stage.state is not State.COMPLETED:
            if isinstance(time, TimePlan):
                say(f"{stage.recipe.name}: {time}")
            _run_stage(stage, time, whole, children, private / f"store-{number}", say)


def _run_stage(
    stage: StagePlan, time: TimePlan | str, whole: RunFolder, children: Children, store: Path, say: Say
) -> None:
    """Run one stage, whose planned time is `time`. `store` is a file for accelerate's launcher."""
    recipe, folder = stage.recipe, stage.folder
    if stage.state is State.STARTED:
        RunFolder.reopen(folder.path, recipe.to_saved(whole.path))
        rewind(recipe, folder, stage.checkpoint, say)
    elif folder.path != whole.path:
        RunFolder.create(folder.path, recipe.to_saved(whole.path))
    _tell(stage, say)
    if stage.merge is not None:
        stage.merge.run(children, folder.logs / "merge.log", say)
    server = None
    if stage.server is None:
        stage.assignment(None, time).write(folder.assignment)
    else:
        folder.assignment.unlink(missing_ok=True)
        command, log = stage.server.arguments, folder.logs / "server.log"
        server = begin_server(recipe, command, children, log, say, env=stage.server.env)
    assert stage.trainer is not None
    with nullcontext() if stage.machines.during is None else stage.machines.during(stage):
        # the trainer imports its modules while the server starts, and uses no device before it has the assignment
        trainer = children.start(
            "trainer",
            stage.trainer.arguments,
            folder.logs / "train.log",
            env=stage.trainer.env | ({"PET_RDZV_ENDPOINT": str(store)} if stage.machines.count == 1 else {}),
            show=True,
            explain=first_rank_that_failed if recipe.train.processes > 1 else None,
            is_finishing=folder.is_finishing,
        )
        if server is not None:
            # on a CPU, trainer and worker load while the server does
            url = wait_for_server(recipe, server, children, say, early=not stage.placement.on_gpu)
            stage.placement.check_trainers_room()
            stage.assignment(url, time).write(folder.assignment)
            wait_for_server(recipe, server, children, say)
        try:
            children.wait(trainer)
        except ChildFailed:
            summary = folder.read_summary()
            if summary.get("status") == "stopped":
                raise RunStopped(summary["reason"], best_checkpoint(summary, folder.path)) from None
            raise
    if server is not None:
        children.stop(server)


def _tell(stage: StagePlan, say: Say) -> None:
    if (line := stage.describe_adapter()) is not None:
        say(line)
    for line in stage.placement.describe():
        say(line)
    if stage.refusal is not None:
        raise stage.refusal


def first_rank_that_failed(log: list[str]) -> str | None:
    said = (re.match(r"\[rank\d+\]: (?!Traceback)(\S.*)", line) for line in log)
    return next((found[1] for found in said if found), None)
