"""Train one recipe on the processes that accelerate started: `accelerate launch -m agentfactory.train RECIPE [key=value
...]`, or `accelerate launch train.py ...` in a checkout.

Reinforcement learning needs an inference server at `server.url` (`agentfactory serve RECIPE`); rank 0 starts the
rollout worker. `--resume [PATH]` goes on with the run in `output`. `agentfactory train RECIPE` does all of it, and runs
the stages of a staged recipe.
"""

from agentfactory.tools import import_path

if __name__ == "__main__":
    import_path.start_folder_last()

import argparse
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import yaml

from agentfactory.launching import resume
from agentfactory.launching.resume_option import add_resume_option, settle_resume
from agentfactory.recipe.composition import COMMAND_LINE
from agentfactory.launching.progress import Progress, tell_warnings
from agentfactory.tools.errors import SettingError
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe
from agentfactory.launching.run_folder import Hold, RunFolder, RunFolderError
from agentfactory.tools import parent_watch
from agentfactory.trainers.best_checkpoint import BestCheckpoint, find_best
from agentfactory.trainers.checkpoint_folder import checkpoints as found_checkpoints
from agentfactory.trainers.health import Finding, Health, Symptom

# by its name as a module: run by `python -m` it is __main__
logger = logging.getLogger("agentfactory.train")

STOPPED = 3
"""Exit status of a run that a symptom of train.stop_when ended."""


def load(arguments: list[str]) -> tuple[Recipe, str | None]:
    """The recipe that the command line names, and what it resumes. Raises SettingError."""
    parser = argparse.ArgumentParser(prog="python -m agentfactory.train")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    add_resume_option(parser)
    options, rest = parser.parse_known_args(arguments)
    options.overrides += rest
    settle_resume(options)
    if options.recipe is None:
        raise SettingError(
            "RECIPE", "missing", "accelerate launch -m agentfactory.train RECIPE [key=value ...]", source=COMMAND_LINE
        )
    recipe = load_recipe(options.recipe, options.overrides)
    if isinstance(recipe, StagedRecipe):
        raise SettingError(
            "stages", "train.py trains one stage", "run `agentfactory train` on it", source=options.recipe
        )
    runs_chains = recipe.train.algorithm != "sft" and not recipe.train.from_trajectories
    if runs_chains and recipe.server.url is None:
        fix = "run `agentfactory serve` and pass server.url=ADDRESS, or run `agentfactory train`"
        raise SettingError("server.url", "missing: there is no server to roll out on", fix, source=options.recipe)
    if recipe.prepare and not (recipe.output / "prepared").exists():
        raise SettingError(
            "prepare", "has not run yet", "run `agentfactory train` on the recipe", source=options.recipe
        )
    return recipe, options.resume


def open_folder(recipe: Recipe, resumed: str | None, hold: Hold) -> tuple[RunFolder, Path | None]:
    """The run folder, and the checkpoint to go on from; for rank 0. Raises RunFolderError and SettingError."""
    folder, text = RunFolder(recipe.output), recipe.to_yaml()
    if RunFolder.attached(recipe.output):
        # the launcher has made or rewound it, holds it, and has checked the checkpoint
        return folder, Path(resumed) if resumed else None
    hold.take()
    if resumed is None:
        folder, checkpoint = RunFolder.create(recipe.output, text), None
    else:
        checkpoint = resume.plan([recipe], resumed)[0].checkpoint
        RunFolder.reopen(recipe.output, text)
    hold.take(make=True)
    if resumed is not None:
        resume.rewind(folder, checkpoint, lambda line: print(line, flush=True))
    return folder, checkpoint


def train(recipe: Recipe, resumed: str | None) -> signal.Signals | Symptom | None:
    """Train, and leave a run folder: rank 0 writes it and owns the worker, the sync and the log. Returns what has ended
    it early, if anything has."""
    # torch and transformers take seconds to import; a broken recipe is told before
    import transformers
    from accelerate.utils import broadcast_object_list

    from agentfactory.rollout.data import load_tasks
    from agentfactory.rollout.delivery import WorkerProcess
    from agentfactory.rollout.renderer import load_renderer
    from agentfactory.rollout.trajectory import Group
    from agentfactory.trainers.checkpoints import Checkpoints
    from agentfactory.trainers.accelerator import check_same_recipe, make_accelerator
    from agentfactory.trainers.rl import train_rl
    from agentfactory.trainers.server_control import SLEEP_ROUTES, ServerControl
    from agentfactory.trainers.sft import conversation_rows, saved_rows, train_sft
    from agentfactory.trainers.source import GroupSource, SavedGroups
    from agentfactory.trainers.stopping import Stop
    from agentfactory.trainers.sync.protocol import WeightSync
    from agentfactory.trainers.sync.backends import backend_of
    from agentfactory.trainers.sync.make import make_sync
    from agentfactory.trainers.sync.canary import Canary, canary_rows
    from agentfactory.trainers.sync.retrying import RetryingSync
    from agentfactory.trainers.time_share import TimeShare
    from agentfactory.trainers.tracking import Tracking

    # bars of loading and writing would run through our own progress
    transformers.utils.logging.disable_progress_bar()
    accelerator = make_accelerator(recipe.train)
    check_same_recipe(recipe)
    train, main = recipe.train, accelerator.is_main_process
    folder = RunFolder(recipe.output)
    opened: list[Any] = [None]
    with ExitStack() as stack:
        if main:
            hold = stack.enter_context(Hold(recipe.output))
            folder, opened[0] = open_folder(recipe, resumed, hold)
            progress = Progress(train.steps, "sft" if train.algorithm == "sft" else "grpo")
            stack.callback(progress.close)
            stack.enter_context(tell_warnings(progress.note))
            if RunFolder.attached(recipe.output):
                # the launcher shows what goes to stdout, and keeps what goes to stderr
                logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            stack.callback(folder.note_stopped)
        checkpoint: Path | None = broadcast_object_list(opened)[0]
        stop = Stop()
        stop.listen(accelerator, folder.note_stopping)
        renderer = load_renderer(recipe.model, recipe.rollout.parser, tools=bool(recipe.tools or recipe.mcp_servers))
        tokenizer = renderer.tokenizer
        # a checkpoint carries the template that it was trained with
        tokenizer.chat_template = renderer.chat_template
        info: dict[str, Any] = {"algorithm": train.algorithm, "seed": recipe.seed, "renderer": renderer.info}
        info["recipe"] = yaml.safe_load(recipe.to_yaml())
        checkpoints = Checkpoints(folder.checkpoints, tokenizer, train, info, folder.growing, checkpoint)
        train_state = checkpoints.train_state
        tracking: Tracking | None = None
        if main and recipe.track.trackers:
            tracking = Tracking(recipe.track, folder.title, folder.path, info["recipe"], train_state.step)
            stack.enter_context(tracking)

        health = Health()
        findings: list[Finding] = []
        for metrics in folder.read_metrics() if main else ():
            # a resumed run is compared with its earlier steps, and keeps their warnings
            findings += health.note(metrics)

        def show(metrics: dict[str, Any]) -> None:
            progress.update(metrics)
            if tracking is not None:
                tracking.log(metrics)
            for finding in health.note(metrics):
                logger.warning("%s", finding.text)
                findings.append(finding)
                if finding.symptom in train.stop_when:
                    stop.ask(finding.symptom)

        def note(step: int, groups: list[Group], credit: list[str]) -> None:
            folder.note_credit(credit)
            if tracking is not None:
                tracking.note_groups(step, groups)

        folder.on_log = show
        saved = Path(train.from_trajectories) if train.from_trajectories else None
        if train.algorithm == "sft":
            rows = None
            if main and saved:
                rows = saved_rows(saved, train.min_reward)
            elif main and recipe.data:
                rows = conversation_rows(load_tasks(recipe.data), renderer)
            result = train_sft(recipe, accelerator, checkpoints, rows=rows, log=folder.log, stop=stop)
        else:
            source: GroupSource | None = None
            sync: WeightSync | None = None
            canary: Canary | None = None
            turns: TimeShare | None = None
            servers: list[ServerControl] = []
            total = train.steps * train.batch_size
            if not saved:
                # every rank computes the trainer's scores: the policy may be sharded
                longest = min(recipe.server.max_model_len, recipe.rollout.max_total_tokens) - 1
                special = set(tokenizer.all_special_ids)
                vocabulary = [token for token in range(len(tokenizer)) if token not in special]
                probes = canary_rows(vocabulary, longest, recipe.seed)
                canary = Canary(servers, probes, recipe.model.dtype, rounded=bool(recipe.rounding))
            if main and saved:
                source = SavedGroups(saved, total, skip=train_state.step * train.batch_size)
            elif main and canary:
                servers += [ServerControl(url, recipe.server.api_key_env) for url in recipe.server.urls]
                for server in servers:
                    server.require(backend_of(recipe).routes)
                # the process id tells this attempt's adapters from those that an earlier one left on the server
                backend = make_sync(recipe, servers, folder.sync, recipe.name, os.getpid())
                if recipe.placement.mode == "time_share":
                    servers[0].require(SLEEP_ROUTES)
                    turns = TimeShare(servers[0], accelerator.device, recipe.server.retry_seconds, stop)
                    backend = turns.waking(backend)
                sync = patient = RetryingSync(backend, canary, recipe.server.retry_seconds)
                stack.callback(sync.close)
                source = worker = WorkerProcess(
                    recipe,
                    base=folder.path,
                    urls=recipe.server.urls,
                    trajectories=folder.trajectories,
                    log_file=folder.logs / "worker.log",
                    batch_size=train.batch_size,
                    total=total,
                    restore=patient.bring_back,
                    trained=train_state.trained,
                    versions=train_state.labels,
                )
                stack.callback(worker.close)
            result = train_rl(
                recipe,
                accelerator,
                checkpoints,
                source=source,
                sync=sync,
                canary=canary,
                log=folder.log,
                note=note,
                stop=stop,
                turns=turns,
            )
        # one that came in the last evaluation has cut it short
        stop.agreed(accelerator)
        if main:
            figures = {f"{name}_before": value for name, value in _headline(result.before).items()}
            figures |= {f"{name}_after": value for name, value in _headline(result.after).items()}
            folder.write_summary(
                {
                    "status": _status(stop.agreed_on),
                    **({"reason": _reason(stop.agreed_on, findings)} if stop.agreed_on else {}),
                    **figures,
                    "steps": result.steps,
                    "evaluated_step": result.evaluated,
                    "train_wall_seconds": result.seconds,
                    "seed": recipe.seed,
                    "checkpoint": str(result.checkpoint) if result.checkpoint else None,
                    "best_checkpoint": _named(find_best(found_checkpoints(folder.checkpoints), train.keep_best)),
                    "warnings": [finding.text for finding in findings],
                }
            )
        if stop.agreed_on and main:
            by_signal = isinstance(stop.agreed_on, signal.Signals)
            by = stop.agreed_on.name if by_signal else f"train.stop_when ({stop.agreed_on})"
            goes_on = "; go on with --resume" if by_signal else ""
            progress.note(f"stopped by {by} after step {result.steps}{goes_on}")
        stop.end(accelerator)
        accelerator.end_training()
    return stop.agreed_on


def _status(ended_by: signal.Signals | Symptom | None) -> str:
    """For summary.json."""
    if ended_by is None:
        return "completed"
    return "interrupted" if isinstance(ended_by, signal.Signals) else "stopped"


def _reason(ended_by: signal.Signals | Symptom, findings: list[Finding]) -> str:
    """For summary.json."""
    if isinstance(ended_by, signal.Signals):
        return ended_by.name
    said = next(finding.text for finding in reversed(findings) if finding.symptom is ended_by)
    return f"train.stop_when: {ended_by}: {said}"


def _named(best: BestCheckpoint | None) -> dict[str, Any] | None:
    """For summary.json."""
    return {"path": str(best.path), "step": best.step, "metric": best.metric, "value": best.value} if best else None


def _headline(figures: dict[str, float]) -> dict[str, float]:
    """The figures of an evaluation that a summary shows: success (sampled), greedy success, reward (sampled)."""
    names = {"success": "eval/sampled/success", "greedy": "eval/greedy/success", "reward": "eval/sampled/reward"}
    return {short: figures[name] for short, name in names.items() if name in figures}


def main() -> int:
    """Run the command line; returns the exit status: 0 done, 1 failed, 2 the recipe or launch is wrong, 3 a symptom of
    train.stop_when ended it, 128 + its number where a signal came."""
    parent_watch.follow_parent()
    # so that the worker and the progress display are closed in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        recipe, resumed = load(sys.argv[1:])
    except (SettingError, RunFolderError) as error:
        print(error, file=sys.stderr)
        return 2
    from agentfactory.rollout.delivery import WorkerDiedError
    from agentfactory.trainers.accelerator import LaunchError
    from agentfactory.trainers.server_control import SyncError
    from agentfactory.trainers.tracking import TrackingError

    try:
        ended_by = train(recipe, resumed)
    except (LaunchError, RunFolderError, SettingError) as error:
        # every rank finds it, but what is on a machine's disk; one rank of each machine says it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say_why(error)
        return 2
    except (WorkerDiedError, SyncError, TrackingError, ValueError, FloatingPointError) as error:
        say_why(error)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(ended_by, Symptom):
        return STOPPED
    return 128 + ended_by if ended_by else 0


def say_why(error: Exception) -> None:
    """Say what ended this process; of several, as torch marks a rank's traceback, so that the launcher can tell the
    cause from what it has brought down."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    print(f"[rank{os.environ.get('RANK', '0')}]: {error}" if several else error, file=sys.stderr)


def leave(status: int) -> NoReturn:
    """End this process; as one of several, without the interpreter's own end.

    A thread of gloo that lets go of its last collective's tensors takes the GIL; where the interpreter ends just then,
    Python ends that thread, and C++ takes that for a fault and aborts the process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
