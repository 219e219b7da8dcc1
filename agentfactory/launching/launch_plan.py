"""The plan of `agentfactory train`, computed without side effects: a `RunPlan` has a `StagePlan` per stage. The
launcher executes it, `--dry-run` prints it, and the trainer's processes receive an `Assignment`."""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.base.processes.devices import may_have_gpu
from agentfactory.base.user_code.import_path import own_python
from agentfactory.launching.merging import Merge
from agentfactory.launching.placement import Placement, place
from agentfactory.launching.prepare import prepare_command
from agentfactory.launching.resumption import changed_code, check_recipe, choose
from agentfactory.launching.run_folder import RunFolder, RunFolderError
from agentfactory.launching.time_plan import TimePlan, plan_times
from agentfactory.recipe.adapters import differences
from agentfactory.recipe.checks import runs_chains
from agentfactory.recipe.composition import COMMAND_LINE, display
from agentfactory.recipe.schema import MERGED, Recipe, StagedRecipe, stages_of, updated
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoint_path, step_of
from agentfactory.trainers.config import ACCELERATE, PORTLESS_ENVIRONMENT, PORTLESS_OPTIONS

AUTO = "auto"
"""Stands for the run's newest checkpoint, in place of a path."""

TRAINER = ("-m", "agentfactory.train")
_POLL_SECONDS = 0.1


class State(StrEnum):
    NEW = "new"
    STARTED = "started"
    COMPLETED = "completed"


@dataclass(frozen=True)
class Assignment:
    """The input of the trainer's processes: the checked recipe with the server's address, and a checkpoint."""

    recipe: Recipe
    checkpoint: Path | None
    plan: TimePlan | None = None

    def write(self, file: Path) -> None:
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        plan = asdict(self.plan) if self.plan else None
        data = {"recipe": self.recipe.model_dump(mode="json"), "checkpoint": checkpoint, "plan": plan}
        write_whole(file, f"{json.dumps(data, indent=2)}\n".encode())

    @classmethod
    def wait_for(cls, file: Path) -> "Assignment":
        """Read the assignment once the launcher has written it. Raises SettingError like `read`."""
        while not file.exists():
            time.sleep(_POLL_SECONDS)
        return cls.read(file)

    @classmethod
    def read(cls, file: Path) -> "Assignment":
        """Read a file written by `write`. Raises SettingError for any other file."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            recipe = Recipe.model_validate_json(json.dumps(data["recipe"]), strict=True)
            plan = TypeAdapter(TimePlan | None).validate_python(data["plan"])
            return cls(recipe, Path(data["checkpoint"]) if data["checkpoint"] else None, plan)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"{display(file)} is not an assignment: {' '.join(str(error).split())[:200]}"
            fix = "only the launcher writes one: run `agentfactory train RECIPE`"
            raise SettingError("--assignment", problem, fix, source=COMMAND_LINE) from error


@dataclass(frozen=True)
class Command:
    """The arguments of a process, and the environment variables to add to ours."""

    arguments: list[str]
    env: dict[str, str]

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *self.arguments])


@dataclass(frozen=True)
class Machines:
    """The machines that train together, each with an accelerate launcher."""

    count: int = 1
    options: tuple[str, ...] = ("--main_process_port", "0", *PORTLESS_OPTIONS)
    """How this machine's launcher finds the others."""
    during: "Callable[[StagePlan], AbstractContextManager[object]] | None" = None
    """Context of a stage's training, whose servers the caller starts; None: they run, or the launcher starts one."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run; a run without stages has a single one. `placed` sets the fields from `placement` on."""

    recipe: Recipe
    folder: RunFolder
    machines: Machines = field(default_factory=Machines, kw_only=True)
    state: State = State.NEW
    checkpoint: Path | None = None
    """The checkpoint that a started stage resumes from; None: from its beginning."""
    merge: Merge | None = None
    placement: Placement = field(default_factory=Placement)
    is_placed: bool = False
    """False until the model exists; until then, `placement` contains only what is known without it."""
    refusal: SettingError | None = None
    assigned: Recipe | None = None
    server: Command | None = None
    """None if the stage needs no server, or uses one that is already running."""
    trainer: Command | None = None

    def placed(self, placement: Placement | None) -> "StagePlan":
        """Return the plan with `placement` and the fields derived from it. None: the model does not exist yet."""
        recipe = self.recipe
        known = placement or Placement(mode=recipe.placement.mode, on_gpu=may_have_gpu())
        server = None
        if runs_chains(recipe, "train") and recipe.server.url is None:
            arguments = known.server_command(recipe, weight_transfer=known.weight_transfer(recipe))
            server = Command(arguments, known.environment("server"))
        return replace(
            self,
            placement=known,
            is_placed=placement is not None,
            refusal=known.refusal(recipe),
            assigned=known.for_trainer(recipe),
            server=server,
            trainer=trainer_command(recipe, self.folder, known, self.machines),
        )

    def describe_adapter(self) -> str | None:
        if self.merge is not None:
            return self.merge.describe()
        lora = self.recipe.model.lora
        if lora is None or lora.from_ is None:
            return None
        return f"continues the adapter in {display(Path(lora.from_))} (rank {lora.rank}) on {self.recipe.model.path}"

    def assignment(self, url: str | None, plan: TimePlan | str = "") -> Assignment:
        """Return the input of the trainer's processes; `url` is their server, `plan` the planned time."""
        assert self.assigned is not None
        recipe = self.assigned if url is None else updated(self.assigned, "server", url=url)
        return Assignment(recipe, self.checkpoint, plan if isinstance(plan, TimePlan) else None)


def trainer_command(recipe: Recipe, folder: RunFolder, placement: Placement, machines: Machines) -> Command:
    """Return the command of this machine's trainer processes."""
    train, module = recipe.train, (*TRAINER, "--assignment", str(folder.assignment))
    env = placement.environment("trainer")
    if train.processes == 1:
        # same as `accelerate launch` for one process, without the seconds that it takes to import torch
        return Command(own_python(*module), env)
    # seconds from torchrun's SIGTERM to its SIGKILL; long, because the launcher decides when to kill
    env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **(PORTLESS_ENVIRONMENT if machines.count == 1 else {})}
    if not placement.on_gpu:
        # several processes on the CPU: neither --cpu nor a MULTI_CPU configuration starts them
        env["ACCELERATE_USE_CPU"] = "true"
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / f"{train.strategy}.yaml"))
    return Command(own_python(*launch, "--num_processes", str(train.processes), *machines.options, *module), env)


@dataclass(frozen=True)
class RunPlan:
    recipe: Recipe | StagedRecipe
    stages: tuple[StagePlan, ...]
    prepare: Command | None = None
    """Runs the recipe's `prepare`; None if it names none, or it has run."""

    @property
    def due(self) -> list[StagePlan]:
        return [stage for stage in self.stages if stage.state is not State.COMPLETED]

    def placed(self) -> "RunPlan":
        """Return the plan with a placement for every due stage whose model is known. Raises PlacementError."""
        missing = [stage for stage in self.due if not stage.is_placed]
        found = place([_planned(stage) for stage in missing], "train", missing[0].machines.count) if missing else []
        placed = {stage.folder.path: stage.placed(placement) for stage, placement in zip(missing, found, strict=True)}
        return replace(self, stages=tuple(placed.get(stage.folder.path, stage) for stage in self.stages))

    def describe(self) -> Iterator[str]:
        if self.prepare is not None:
            yield f"prepare: {self.prepare}"
        for stage, needs in zip(self.stages, self.times(), strict=True):
            name = stage.recipe.name
            starts = stage.checkpoint if stage.state is State.STARTED else None
            resumes = f", resumes from {display(starts)}" if starts else ""
            yield f"{name}: {stage.state}, in {display(stage.folder.path)}{resumes}"
            if stage.state is State.COMPLETED:
                continue
            if (line := stage.describe_adapter()) is not None:
                yield f"{name}: {line}"
            if starts is not None:
                yield from (f"warning: {text}" for text in changed_code(stage.recipe, starts))
            yield from describe_memory(stage.recipe, stage.placement if stage.is_placed else None)
            yield f"{name}: {needs}"
            if stage.server is not None:
                yield f"{name}: server: {stage.server}"
            yield f"{name}: trainer: {stage.trainer}"

    def times(self) -> list[TimePlan | str]:
        done = [step_of(stage.checkpoint) if stage.checkpoint is not None else 0 for stage in self.stages]
        return [*plan_times([stage.recipe for stage in self.stages], done)]


def describe_memory(recipe: Recipe, placement: Placement | None) -> Iterator[str]:
    unknown = [f"its memory is planned once {recipe.model.path} exists"]
    for line in unknown if placement is None else placement.describe():
        yield f"{recipe.name}: {line}"


def plan_run(
    recipe: Recipe | StagedRecipe, resume: str | None, overwrite: bool = False, machines: Machines | None = None
) -> RunPlan:
    """Plan a run of `recipe` without writing anything. `resume` is a checkpoint of the run in `output`, or AUTO.
    With `overwrite`, the contents of `output` will be deleted. Raises PlacementError, and like `resume_stages`."""
    stages = stages_of(recipe)
    if resume is not None:
        RunFolder(recipe.output).need_run()
        planned = resume_stages(stages, resume)
    else:
        planned = []
        for stage in stages:
            planned.append(_new(stage, planned[-1] if planned else None))
    has_run = (recipe.output / "prepared").exists() and not overwrite
    prepare = None if recipe.prepare is None or has_run else Command(prepare_command(recipe), {})
    staged = [replace(stage, machines=machines or Machines()) for stage in planned]
    return RunPlan(recipe, tuple(staged), prepare).placed()


def resume_stages(stages: Sequence[Recipe], asked: str) -> list[StagePlan]:
    """Return stages with their states and checkpoints (`asked`: one, or AUTO). Raises RunFolderError, SettingError."""
    path = None if asked == AUTO else Path(asked).expanduser().resolve()
    folders = [RunFolder(stage.output) for stage in stages]
    if path is not None and path.parent not in [folder.checkpoints.resolve() for folder in folders]:
        places = ", ".join(display(folder.checkpoints) for folder in folders)
        raise RunFolderError(f"--resume: {display(path)} is not a checkpoint of the run; fix: name one in {places}")
    planned: list[StagePlan] = []
    for recipe, folder in zip(stages, folders, strict=True):
        before = planned[-1] if planned else None
        own = folder.checkpoints / path.name if path and path.parent == folder.checkpoints.resolve() else None
        if before is None or before.state is State.COMPLETED:
            planned.append(_resumed(*_after(recipe, before), folder, own))
        elif folder.recipe.exists():
            raise RunFolderError(
                f"{display(folder.path)}: stage {recipe.name} has begun, but the stage before it is not completed; "
                "fix: move that folder away, or begin another run with output=OTHER"
            )
        else:
            planned.append(_new(recipe, before))
    if planned[-1].state is State.COMPLETED:
        done = f"{display(folders[-1].path)} is completed, with {folders[-1].read_summary()['steps']} steps"
        raise RunFolderError(f"--resume: {done}; fix: raise train.steps to continue")
    return planned


def _new(recipe: Recipe, before: StagePlan | None) -> StagePlan:
    recipe, merge = _after(recipe, before)
    return StagePlan(recipe, RunFolder(recipe.output), merge=merge)


def _resumed(recipe: Recipe, merge: Merge | None, folder: RunFolder, asked: Path | None) -> StagePlan:
    if not os.path.lexists(folder.recipe):
        return StagePlan(recipe, folder, merge=merge)
    folder.check_entries("--resume")
    if merge is not None:
        merge.check()
    checkpoint = choose(folder, asked)
    check_recipe(recipe, folder, checkpoint)
    try:
        summary = folder.read_summary()
        done = summary.get("status") == "completed" and summary["steps"] >= recipe.train.steps and asked is None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunFolderError(f"--resume: {folder.summary} cannot be read: {error!r}; fix: delete it") from None
    return StagePlan(recipe, folder, State.COMPLETED if done else State.STARTED, checkpoint, merge)


def _after(recipe: Recipe, before: StagePlan | None) -> tuple[Recipe, Merge | None]:
    """Return `recipe` with the network that it begins with, and the merge that makes its model, if any: after full
    weights, their checkpoint; after an adapter, the adapter on the same base, or the merged base."""
    lora = recipe.model.lora
    if before is None:
        if lora is None or lora.from_ is None or not lora.merge:
            return recipe, None
        return _merged(recipe, Path(lora.from_), recipe.model.path)
    folder, trained = before.folder, before.recipe
    is_done = before.state is State.COMPLETED
    last = folder.need_checkpoint() if is_done else checkpoint_path(folder.checkpoints, trained.train.steps)
    if trained.model.lora is None:
        return recipe.with_model(str(last)), None
    if lora is None:
        return _merged(recipe, last, trained.model.path, f"{recipe.name} trains all weights")
    if lora.merge:
        return _merged(recipe, last, trained.model.path, differences(lora, trained.model.lora))
    return _with_lora(recipe.with_model(trained.model.path), from_=str(last)), None


def _merged(recipe: Recipe, adapter: Path, base: str, reason: str = "") -> tuple[Recipe, Merge]:
    output = recipe.output / MERGED
    merge = Merge(adapter, base, recipe.model.dtype, output, reason)
    recipe = recipe.with_model(str(output))
    return (recipe if recipe.model.lora is None else _with_lora(recipe, from_=None, merge=None)), merge


def _with_lora(recipe: Recipe, **settings: Any) -> Recipe:
    assert recipe.model.lora is not None
    return updated(recipe, "model", lora=recipe.model.lora.model_copy(update=settings))


def _planned(stage: StagePlan) -> Recipe:
    """Return the stage's recipe for planning its memory: a merged model has the shape of its base."""
    return stage.recipe if stage.merge is None or stage.merge.is_done else stage.recipe.with_model(stage.merge.base)
