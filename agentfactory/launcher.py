"""What the commands do on one machine: prepare, start the server, start the trainer ranks, and end them all."""

import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfactory.checks import runs_chains
from agentfactory.composition import COMMAND_LINE, RecipeError
from agentfactory.curve import draw_curve
from agentfactory.placement.placed import Placement, place
from agentfactory.processes import POLL_SECONDS, Child, ChildFailed, Children, python
from agentfactory.recipe import Recipe, StagedRecipe
from agentfactory.resume import Part, State, plan, rewind
from agentfactory.run_folder import RunFolder, RunFolderError, check_free, next_free
from rollout import serving

if TYPE_CHECKING:
    from rollout.evaluate import Evaluation

_ADAPTER = "adapter_config.json"
_SAY_EVERY_SECONDS = 10.0
TRAIN_SCRIPT = Path(__file__).resolve().parent.parent / "train.py"
ACCELERATE = TRAIN_SCRIPT.parent / "recipes" / "accelerate"

Say = Callable[[str], None]


def train(recipe: Recipe | StagedRecipe, overwrite: bool, resume: str | None, say: Say) -> None:
    """Run every stage; leaves a run folder. `resume` goes on with the one that is there, from this checkpoint or AUTO.
    Raises ChildFailed, RunFolderError, RecipeError, KeyboardInterrupt."""
    text = recipe.to_yaml()
    if overwrite and "${output}/" in text:
        raise RunFolderError(
            f"output: the recipe reads files in {recipe.output}, which --overwrite would delete; fix: output=OTHER"
        )
    stages = recipe.stages if isinstance(recipe, StagedRecipe) else [recipe]
    if resume is None:
        check_free(recipe.output, overwrite)
        parts = [Part(stage, RunFolder(stage.output)) for stage in stages]
    else:
        parts = plan(stages, resume)
    due = [part.recipe for part in parts if part.state is not State.COMPLETED]
    # what does not fit is refused before anything is written, as far as its model is there already
    placements = place(due, "train")
    for stage, placement in zip(due, placements, strict=True):
        if placement is not None and placement.refused:
            _settle(placement, stage, say)
    folder = (
        RunFolder.create(recipe.output, text, overwrite) if resume is None else RunFolder.reopen(recipe.output, text)
    )
    try:
        with Children() as children:
            _prepare(recipe, children, say)
            for number, part in enumerate(parts):
                if len(parts) > 1:
                    say(f"stage {number + 1} of {len(parts)}: {part.recipe.name} ({part.state})")
                placement = placements[0] if part.recipe is due[0] else None
                _train_part(part, folder, parts[number - 1].folder if number else None, placement, children, say)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        status, reason = ("interrupted", str(error) or "Ctrl-C") if interrupted else ("failed", str(error))
        folder.write_summary({**folder.read_summary(), "status": status, "reason": reason, "seed": recipe.seed})
        raise
    last = parts[-1].folder
    summary = {**last.read_summary(), "status": "completed"}
    folder.write_summary(summary)
    curve = draw_curve(last.read_metrics(), folder.path / "curve.png", recipe.name)
    say(_conclusion(recipe.name, summary, folder.path, curve))


def _train_part(
    part: Part,
    whole: RunFolder,
    previous: RunFolder | None,
    placement: Placement | None,
    children: Children,
    say: Say,
) -> None:
    if part.state is State.COMPLETED:
        return
    recipe, folder = part.recipe, part.folder
    if previous is not None:
        recipe = _with_model(recipe, str(_need_checkpoint(previous)))
    if part.state is State.STARTED:
        RunFolder.reopen(folder.path, recipe.to_yaml())
        rewind(folder, part.checkpoint, say)
    elif folder.path != whole.path:
        RunFolder.create(folder.path, recipe.to_yaml())
    # a model that was made meanwhile is planned now
    placement = _settle(placement or _placed(recipe, "train"), recipe, say)
    _train_one(recipe, folder, part.checkpoint, placement, children, say)


def _train_one(
    recipe: Recipe, folder: RunFolder, checkpoint: Path | None, placement: Placement, children: Children, say: Say
) -> None:
    command = [*_trainer_command(recipe), str(folder.recipe), *placement.overrides(recipe)]
    if checkpoint is not None:
        command += ["--resume", str(checkpoint)]
    server = None
    if runs_chains(recipe, "train") and recipe.server.url is None:
        log, transfer = folder.logs / "server.log", placement.weight_transfer(recipe)
        server, url = _start_server(recipe, children, log, say, weight_transfer=transfer, placement=placement)
        command.append(f"server.url={url}")
        placement.check_trainers_room()
    env, log = _trainer_env(recipe, folder) | placement.environment("trainer"), folder.logs / "train.log"
    trainer = children.start("trainer", command, log, env=env, show=True, is_finishing=folder.is_finishing)
    children.wait(trainer)
    if server is not None:
        children.stop(server)


def _trainer_command(recipe: Recipe) -> list[str]:
    if recipe.train.processes == 1:
        # what `accelerate launch` would do for one process, without the seconds that it takes to import torch
        return python(str(TRAIN_SCRIPT))
    configuration = ACCELERATE / f"{recipe.train.strategy}.yaml"
    return python(
        *("-m", "accelerate.commands.launch", "--config_file", str(configuration)),
        *("--num_processes", str(recipe.train.processes), "--main_process_port", "0", str(TRAIN_SCRIPT)),
    )


def _trainer_env(recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    env = folder.attachment()
    if recipe.train.processes > 1 and not _has_gpu():
        # several processes on the CPU: neither --cpu nor a MULTI_CPU configuration starts them
        env["ACCELERATE_USE_CPU"] = "true"
    if recipe.train.processes > 1:
        # torchrun kills its processes that long after it told them to end; this launcher knows better when to
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "600"
    return env


def _has_gpu() -> bool:
    # asked in a child: torch stays out of the launcher, and no CUDA context stays behind
    code = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 3)"
    status = subprocess.run(python("-c", code), check=False).returncode
    if status not in (0, 3):
        raise ChildFailed(f"torch could not be asked for GPUs: exit status {status}")
    return status == 0


def _prepare(recipe: Recipe | StagedRecipe, children: Children, say: Say) -> None:
    folder = recipe.output / "prepared"
    if recipe.prepare is None or folder.exists():
        return
    say(f"preparing {folder}")
    arguments = ("-m", "agentfactory.prepare", recipe.prepare, str(folder), str(recipe.seed))
    children.wait(children.start("prepare function", python(*arguments), recipe.output / "logs" / "prepare.log"))


def _start_server(
    recipe: Recipe,
    children: Children,
    log: Path,
    say: Say,
    adapters: dict[str, Path] | None = None,
    weight_transfer: str | None = None,
    placement: Placement | None = None,
) -> tuple[Child, str]:
    """Start a server and wait until it is ready; returns it and its address. Further arguments: see server_command."""
    say(f"starting the {recipe.server.engine} server on {recipe.server.model or recipe.model.path}")
    placement = placement or Placement()
    sleeps = placement.mode == "time_share"
    command = serving.server_command(placement.for_server(recipe), adapters, weight_transfer, sleeps)
    server = children.start("server", command, log, env=placement.environment("server"), explain=serving.explain)
    started = said = time.monotonic()
    while (now := time.monotonic()) < started + recipe.server.startup_seconds:
        children.check(server)
        lines = server.tail(1000)
        # the server takes a free port itself, and says which once it answers
        if url := serving.ready_url(lines):
            if said > started:
                say(f"the server is ready after {now - started:.0f} s")
            return server, url
        if now > said + _SAY_EVERY_SECONDS:
            say(f"waiting for the server, {now - started:.0f} s so far: {serving.stage(lines)}")
            said = now
        time.sleep(POLL_SECONDS)
    raise ChildFailed(
        f"the server was not ready after server.startup_seconds={recipe.server.startup_seconds:g} (log: {log})"
    )


def _placed(recipe: Recipe, purpose: Literal["train", "serve"]) -> Placement:
    # where the model is not there even now, who loads it says so
    return place([recipe], purpose)[0] or Placement()


def _settle(placement: Placement, recipe: Recipe, say: Say) -> Placement:
    """Say where the processes go. Raises RecipeError where they cannot."""
    if placement.table:
        say(placement.table)
    if placement.refused is not None:
        raise RecipeError(recipe.name, *placement.refused)
    if recipe.server.engine == "vllm" and recipe.server.url is None and not placement.on_gpu:
        if placement.mode == "time_share":
            fix = "use server.engine=embedded, or placement.mode=separate"
            raise RecipeError(recipe.name, "placement.mode", "'time_share': vLLM sleeps on GPUs only", fix)
        if recipe.sync.backend == "ipc":
            raise RecipeError(recipe.name, "sync.backend", "got 'ipc': vLLM has it on GPUs only", "use auto or file")
    return placement


def serve(recipe: Recipe | StagedRecipe, say: Say) -> None:
    """Serve the recipe's model until the server or this process is ended; of a staged recipe, its last checkpoint.
    The log goes to `<output>/serve`, serve-2, ..."""
    with Children() as children:
        acting = what_is_served(recipe, None).recipe
        _prepare(recipe, children, say)
        placement = _settle(_placed(acting, "serve"), acting, say)
        served, folder = _open("serve", recipe, None, children, say)
        # train.py, which a person starts, takes sync.backend=auto for file
        transfer = replace(placement, sync=None).weight_transfer(served.recipe)
        log = folder.logs / "server.log"
        server, url = _start_server(served.recipe, children, log, say, served.adapters, transfer, placement)
        say(f"ready {url} (log: {log})")
        children.wait(server)


def evaluate(
    recipe: Recipe | StagedRecipe,
    checkpoint: Path | None,
    say: Say,
    *,
    model: str | None = None,
    url: str | None = None,
    samples: int | None = None,
) -> None:
    """Evaluate on `eval.data`, with `samples` in place of eval.samples, into `<output>/eval`, eval-2, ...

    Who is evaluated: `checkpoint`, a folder; or `model`, a folder or a hub name; or the server at `url` (of its models,
    the one called `model`), asked by token ids where it takes them and by OpenAI's chat API otherwise; or the recipe's
    model, and of a staged recipe its last checkpoint.
    """
    from agentfactory import evaluated

    evaluated.check(checkpoint, model, url, samples)
    if samples is not None:
        recipe = evaluated.with_samples(recipe, samples)
    if url is not None:
        _evaluate_at(recipe, url, model, say)
        return
    with _acting("eval", recipe, evaluated.named(model) if model else checkpoint, say) as (served, folder, urls):
        from rollout.evaluate import open_runner, run_eval

        opened = open_runner(served.recipe, folder.path, urls)
        found = run_eval(served.recipe, folder.trajectories, folder.log, opened, served.name)
    _report(found, served.recipe, served.label, folder, say)


def _evaluate_at(recipe: Recipe | StagedRecipe, url: str, model: str | None, say: Say) -> None:
    """Evaluate whoever answers at `url`."""
    from agentfactory import evaluated
    from rollout.client import ServerUnreachableError
    from rollout.evaluate import run_eval

    stage = _last(recipe)
    if isinstance(recipe, StagedRecipe):
        # its own is a checkpoint that may not be there
        stage = _with_model(stage, recipe.stages[0].model.path)
    try:
        there = evaluated.look_at(stage, url, model)
    except evaluated.ChatEndpointError as error:
        raise RecipeError(COMMAND_LINE, error.field, error.problem, error.fix) from None
    except ServerUnreachableError as error:
        raise ChildFailed(str(error)) from error
    with Children() as children:
        _prepare(recipe, children, say)
        folder = _run_folder("eval", recipe, there.recipe)
        _log_to(folder, "eval")
        say(f"asking {there.model} at {url} by {there.how}")
        try:
            opened = evaluated.open_runner_at(there, folder.path)
            found = run_eval(there.recipe, folder.trajectories, folder.log, opened, there.model)
        except (ServerUnreachableError, evaluated.ChatEndpointError) as error:
            raise ChildFailed(str(error)) from error
    _report(found, there.recipe, f"{there.model} at {url}", folder, say)


def _report(found: "Evaluation", recipe: Recipe, label: str, folder: RunFolder, say: Say) -> None:
    from agentfactory.eval_table import tables

    folder.write_summary({"checkpoint": label, "seed": recipe.seed, **found.figures()})
    for table in tables(found):
        say(table)
    say(f"every figure: {folder.summary}; every chain: {folder.trajectories}")
    say(f"{recipe.name}: evaluated {label}; run folder {folder.path}")


def roll_out(recipe: Recipe | StagedRecipe, say: Say) -> None:
    """Run one group of chains for every task of `data` and save them into `<output>/rollout`, rollout-2, ..."""
    with _acting("rollout", recipe, None, say) as (served, folder, urls):
        from rollout.evaluate import run_rollout

        figures = run_rollout(served.recipe, folder.path, urls, folder.trajectories, folder.log, served.name)
        folder.write_summary({"checkpoint": served.label, "seed": recipe.seed, **figures})
    say(f"{recipe.name}: chains are saved; train on them with train.from_trajectories={folder.trajectories}")


@dataclass
class Served:
    """What a server is to serve: the recipe with the base model's path, adapters, the name that requests use."""

    recipe: Recipe
    label: str
    name: str = "policy"
    adapters: dict[str, Path] = field(default_factory=dict)


def what_is_served(recipe: Recipe | StagedRecipe, checkpoint: Path | str | None) -> Served:
    """`checkpoint`: a folder, or a hub name."""
    if isinstance(checkpoint, str):
        return Served(_unquantised(_with_model(_last(recipe), checkpoint)), checkpoint)
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser().resolve()
        if not checkpoint.is_dir():
            raise RecipeError(COMMAND_LINE, "--checkpoint", f"{checkpoint}: no such folder", "name a checkpoint")
    if isinstance(recipe, StagedRecipe):
        stage = recipe.stages[-1]
        path = checkpoint or _need_checkpoint(RunFolder(stage.output))
    else:
        stage, path = recipe, checkpoint or Path(recipe.model.path)
    if (path / _ADAPTER).is_file():
        base = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        return Served(_with_model(stage, base), str(path), "checkpoint", {"checkpoint": path})
    served = _with_model(stage, str(path))
    if checkpoint is not None or isinstance(recipe, StagedRecipe):
        served = _unquantised(served)
    return Served(served, str(path))


def _unquantised(recipe: Recipe) -> Recipe:
    """A quantised copy of the model that training began with is no copy of another."""
    return recipe.model_copy(update={"server": recipe.server.model_copy(update={"model": None})})


def _last(recipe: Recipe | StagedRecipe) -> Recipe:
    return recipe.stages[-1] if isinstance(recipe, StagedRecipe) else recipe


def _open(
    command: str, recipe: Recipe | StagedRecipe, checkpoint: Path | str | None, children: Children, say: Say
) -> tuple[Served, RunFolder]:
    """What `command` needs served, and a run folder of its own."""
    served = what_is_served(recipe, checkpoint)
    _prepare(recipe, children, say)
    return served, _run_folder(command, recipe, served.recipe)


def _run_folder(command: str, recipe: Recipe | StagedRecipe, acting: Recipe) -> RunFolder:
    """A folder of its own for what `acting`, a part of `recipe`, does."""
    path = next_free(recipe.output / command)
    return RunFolder.create(path, acting.model_copy(update={"output": path, "prepare": None}).to_yaml())


def _log_to(folder: RunFolder, command: str) -> None:
    logging.basicConfig(filename=folder.logs / f"{command}.log", level=logging.INFO)


@contextmanager
def _acting(
    command: str, recipe: Recipe | StagedRecipe, checkpoint: Path | str | None, say: Say
) -> Iterator[tuple[Served, RunFolder, list[str]]]:
    """A run folder, and the addresses of servers for `command`."""
    with Children() as children:
        served, folder = _open(command, recipe, checkpoint, children, say)
        _log_to(folder, command)
        if served.recipe.server.url is not None:
            yield served, folder, served.recipe.server.urls
            return
        log = folder.logs / "server.log"
        server, url = _start_server(served.recipe, children, log, say, served.adapters)
        try:
            yield served, folder, [url]
        except Exception:
            # where the server is gone, that is the cause
            children.check(server)
            raise


def _with_model(recipe: Recipe, path: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})


def _need_checkpoint(folder: RunFolder) -> Path:
    checkpoint = folder.last_checkpoint()
    if checkpoint is None:
        raise RunFolderError(f"{folder.checkpoints} holds no checkpoint; fix: run `agentfactory train` first")
    return checkpoint


def _conclusion(name: str, summary: dict[str, Any], folder: Path, curve: Path | None) -> str:
    figures = [
        f"{kind} {summary[before]:.2f} -> {summary[after]:.2f}"
        for kind, before, after in (
            ("success", "success_before", "success_after"),
            ("greedy", "greedy_before", "greedy_after"),
        )
        if summary.get(before) is not None and summary.get(after) is not None
    ]
    if "steps" in summary:
        figures.append(f"{summary['steps']} steps")
    if "train_wall_seconds" in summary:
        figures.append(f"{summary['train_wall_seconds']:.0f} s of training")
    places = [f"checkpoint {summary['checkpoint']}"] if summary.get("checkpoint") else []
    places += [f"curve {curve}"] if curve else []
    return f"{name}: " + "; ".join([*([", ".join(figures)] if figures else []), *places, f"run folder {folder}"])
