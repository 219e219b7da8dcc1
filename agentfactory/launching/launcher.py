"""Training on one machine: prepare, start the server, start the trainer ranks, and end them all."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from agentfactory.launching.curve import draw_curve
from agentfactory.launching.processes import POLL_SECONDS, Child, ChildFailed, Children
from agentfactory.launching.resume import Part, State, plan, rewind
from agentfactory.launching.run_folder import Hold, RunFolder, RunFolderError, check_free
from agentfactory.placement.placement import Placement, may_have_gpu, place
from agentfactory.recipe.checks import runs_chains
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of
from agentfactory.rollout import serving
from agentfactory.tools.errors import SettingError
from agentfactory.tools.import_path import own_python
from agentfactory.trainers.config import ACCELERATE
from agentfactory.trainers.sync.backends import backend_of

_SAY_EVERY_SECONDS = 10.0
TRAINER = ("-m", "agentfactory.train")

Say = Callable[[str], None]


class RunStopped(Exception):
    """A symptom of train.stop_when has ended the run; the message says which, and where the best checkpoint is."""

    def __init__(self, reason: str, best: list[str]) -> None:
        super().__init__("; ".join([reason, *best]))
        self.reason = reason


def train(recipe: Recipe | StagedRecipe, overwrite: bool, resume: str | None, say: Say) -> None:
    """Run every stage; leaves a run folder. `resume` goes on with the one that is there, from this checkpoint or AUTO.
    Raises ChildFailed, RunStopped, RunFolderError, SettingError, KeyboardInterrupt."""
    with Hold(recipe.output) as hold:
        hold.take()
        _train(recipe, overwrite, resume, say, hold)


def _train(recipe: Recipe | StagedRecipe, overwrite: bool, resume: str | None, say: Say, hold: Hold) -> None:
    text = recipe.to_yaml()
    if overwrite and "${output}/" in text:
        raise RunFolderError(
            f"output: the recipe reads files in {recipe.output}, which --overwrite would delete; fix: output=OTHER"
        )
    stages = stages_of(recipe)
    if resume is None:
        check_free(recipe.output, overwrite)
        parts = [Part(stage, RunFolder(stage.output)) for stage in stages]
    else:
        parts = plan(stages, resume)
    due = [part.recipe for part in parts if part.state is not State.COMPLETED]
    # what does not fit is refused before anything is written, as far as its model is there already
    placements = place(due, "train")
    for stage, placement in zip(due, placements, strict=True):
        # of a model that is yet to be made, no more than this is known
        expected = placement or Placement(mode=stage.placement.mode, on_gpu=may_have_gpu())
        if _refusal(expected, stage) is not None:
            settle(expected, stage, say)
    # one that began meanwhile
    hold.take()
    if overwrite:
        # NFS cannot delete a folder with an open file in it
        hold.release()
    folder = (
        RunFolder.create(recipe.output, text, overwrite) if resume is None else RunFolder.reopen(recipe.output, text)
    )
    hold.take(make=True)
    try:
        with Children() as children:
            prepare(recipe, children, say)
            for number, part in enumerate(parts):
                if len(parts) > 1:
                    say(f"stage {number + 1} of {len(parts)}: {part.recipe.name} ({part.state})")
                placement = placements[0] if part.recipe is due[0] else None
                _train_part(part, folder, parts[number - 1].folder if number else None, placement, children, say)
    except BaseException as error:
        statuses = {KeyboardInterrupt: "interrupted", RunStopped: "stopped"}
        status = next((name for kind, name in statuses.items() if isinstance(error, kind)), "failed")
        reason = error.reason if isinstance(error, RunStopped) else str(error) or "Ctrl-C"
        folder.write_summary({**folder.read_summary(), "status": status, "reason": reason, "seed": recipe.seed})
        raise
    last = parts[-1].folder
    summary = {**last.read_summary(), "status": "completed"}
    folder.write_summary(summary)
    curve = draw_curve(last.read_metrics(), folder.path / "curve.png", recipe.name)
    say(_conclusion(recipe.name, summary, folder.path, curve))
    if (figure := _not_risen(summary)) is not None:
        say(f"{figure} has not risen: causes are in docs/troubleshooting.md, 'The run goes on, and learns nothing'")
    say(f"look at it: agentfactory view {display(folder.path)}")


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
        recipe = recipe.with_model(str(need_checkpoint(previous)))
    if part.state is State.STARTED:
        RunFolder.reopen(folder.path, recipe.to_yaml())
        rewind(folder, part.checkpoint, say)
    elif folder.path != whole.path:
        RunFolder.create(folder.path, recipe.to_yaml())
    # a model that was made meanwhile is planned now
    placement = settle(placement or placed(recipe, "train"), recipe, say)
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
        server, url = start_server(recipe, children, log, say, weight_transfer=transfer, placement=placement)
        command.append(f"server.url={url}")
        placement.check_trainers_room()
    env, log = _trainer_env(recipe, folder) | placement.environment("trainer"), folder.logs / "train.log"
    explain = _first_rank_that_failed if recipe.train.processes > 1 else None
    trainer = children.start(
        "trainer", command, log, env=env, show=True, explain=explain, is_finishing=folder.is_finishing
    )
    try:
        children.wait(trainer)
    except ChildFailed:
        summary = folder.read_summary()
        if summary.get("status") == "stopped":
            raise RunStopped(summary["reason"], _best(summary)) from None
        raise
    if server is not None:
        children.stop(server)


def _trainer_command(recipe: Recipe) -> list[str]:
    if recipe.train.processes == 1:
        # what `accelerate launch` would do for one process, without the seconds that it takes to import torch
        return own_python(*TRAINER)
    configuration = ACCELERATE / f"{recipe.train.strategy}.yaml"
    return own_python(
        *("-m", "accelerate.commands.launch", "--config_file", str(configuration)),
        *("--num_processes", str(recipe.train.processes), "--main_process_port", "0"),
        *TRAINER,
    )


def _first_rank_that_failed(log: list[str]) -> str | None:
    """What it said: the others, and torchrun's own report, come after the cause."""
    said = (re.match(r"\[rank\d+\]: (?!Traceback)(\S.*)", line) for line in log)
    return next((found[1] for found in said if found), None)


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
    status = subprocess.run(own_python("-c", code), check=False).returncode
    if status not in (0, 3):
        raise ChildFailed(f"torch could not be asked for GPUs: exit status {status}")
    return status == 0


def prepare(recipe: Recipe | StagedRecipe, children: Children, say: Say) -> None:
    """Run the recipe's `prepare`, unless its folder is there. Raises ChildFailed."""
    folder = recipe.output / "prepared"
    if recipe.prepare is None or folder.exists():
        return
    say(f"preparing {display(folder)}")
    command = own_python("-m", "agentfactory.launching.prepare", recipe.prepare, str(folder), str(recipe.seed))
    command += map(str, recipe.import_path)
    children.wait(children.start("prepare function", command, recipe.output / "logs" / "prepare.log"))


def start_server(
    recipe: Recipe,
    children: Children,
    log: Path,
    say: Say,
    adapters: dict[str, Path] | None = None,
    weight_transfer: str | None = None,
    placement: Placement | None = None,
) -> tuple[Child, str]:
    """Start a server and wait until it is ready; returns it and its address. Further arguments: see server_command."""
    beside = f" with {', '.join(str(path) for path in adapters.values())}" if adapters else ""
    say(f"starting the {recipe.server.engine} server on {recipe.server.model or recipe.model.path}{beside}")
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


def placed(recipe: Recipe, purpose: Literal["train", "serve"]) -> Placement:
    """Where the processes go, the model being there; where it is not even now, who loads it says so."""
    return place([recipe], purpose)[0] or Placement()


def settle(placement: Placement, recipe: Recipe, say: Say) -> Placement:
    """Say where the processes go. Raises SettingError where they cannot."""
    if placement.table:
        say(placement.table)
    if placement.warning is not None:
        say(f"warning: {placement.warning}")
    if (refusal := _refusal(placement, recipe)) is not None:
        raise refusal
    return placement


def _refusal(placement: Placement, recipe: Recipe) -> SettingError | None:
    """Why the processes cannot go there."""
    if placement.refused is not None:
        return SettingError(*placement.refused, source=recipe.name)
    if recipe.server.engine != "vllm" or recipe.server.url is not None or placement.on_gpu:
        return None
    if placement.mode == "time_share":
        fix = "use server.engine=embedded, or placement.mode=separate"
        return SettingError("placement.mode", "'time_share': vLLM sleeps on GPUs only", fix, source=recipe.name)
    if (backend := backend_of(recipe)).devices == "one":
        problem = f"got {backend.name!r}: vLLM has it on GPUs only"
        return SettingError("sync.backend", problem, "use auto or file", source=recipe.name)
    return None


def need_checkpoint(folder: RunFolder) -> Path:
    """The last checkpoint. Raises RunFolderError where there is none."""
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
    places = [f"checkpoint {display(Path(summary['checkpoint']))}"] if summary.get("checkpoint") else []
    places += _best(summary)
    places += [f"curve {display(curve)}"] if curve else []
    places.append(f"run folder {display(folder)}")
    return f"{name}: " + "; ".join([*([", ".join(figures)] if figures else []), *places])


def _best(summary: dict[str, Any]) -> list[str]:
    """The best checkpoint, where it is not the last one, and better than what training began with."""
    best = summary.get("best_checkpoint")
    if not best or best["path"] == summary.get("checkpoint"):
        return []
    before = summary.get(f"{best['metric'].rpartition('/')[2]}_before")
    if best["metric"].startswith("eval/sampled/") and before is not None and before >= best["value"]:
        return [f"no checkpoint is better than the weights that it began with ({best['metric']} {before:.2f})"]
    return [f"best checkpoint {display(Path(best['path']))} ({best['metric']} {best['value']:.2f})"]


def _not_risen(summary: dict[str, Any]) -> str | None:
    """`success` (where tasks have none, `reward`), unless training has raised it or could not."""
    for figure, highest in (("success", 1.0), ("reward", None)):
        before, after = summary.get(f"{figure}_before"), summary.get(f"{figure}_after")
        if before is not None and after is not None:
            return figure if after <= before != highest else None
    return None
