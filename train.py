"""Train one recipe on the processes that accelerate started: `accelerate launch train.py RECIPE [key=value ...]`.

GRPO needs an inference server at `server.url` (`agentfactory serve RECIPE`); rank 0 starts the rollout worker.
`agentfactory train RECIPE` does all of it, and runs the stages of a staged recipe.
"""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentfactory.progress import Progress
from agentfactory.recipe import Recipe, RecipeError, StagedRecipe, load_recipe
from agentfactory.run_folder import RunFolder, RunFolderError
from tools import lifeline


def load(arguments: list[str]) -> Recipe:
    """The recipe that the command line names. Raises RecipeError."""
    if not arguments:
        raise RecipeError("train.py", "RECIPE", "missing", "accelerate launch train.py RECIPE [key=value ...]")
    recipe = load_recipe(arguments[0], arguments[1:])
    if isinstance(recipe, StagedRecipe):
        raise RecipeError(arguments[0], "stages", "train.py trains one stage", "run `agentfactory train` on it")
    if recipe.train.algorithm == "grpo" and not recipe.train.from_trajectories and recipe.server.url is None:
        fix = "run `agentfactory serve` and pass server.url=ADDRESS, or run `agentfactory train`"
        raise RecipeError(arguments[0], "server.url", "missing: there is no server to roll out on", fix)
    if recipe.prepare and not (recipe.output / "prepared").exists():
        raise RecipeError(arguments[0], "prepare", "has not run yet", "run `agentfactory train` on the recipe")
    return recipe


def train(recipe: Recipe) -> None:
    """Train, and leave a run folder: rank 0 writes it and owns the worker, the sync and the log."""
    # torch and transformers take seconds to import; a broken recipe is told before
    import transformers

    from rollout.data import load_tasks
    from rollout.delivery import WorkerProcess
    from rollout.renderer import load_renderer
    from trainers.grpo import GroupSource, SavedGroups, train_grpo
    from trainers.launch import make_accelerator
    from trainers.server_control import ServerControl
    from trainers.sft import conversation_rows, saved_rows, train_sft
    from trainers.sync import WeightSync, control_routes, make_sync
    from trainers.sync.canary import Canary, canary_rows
    from trainers.sync.patient import PatientSync

    # bars of loading and writing would run through our own progress
    transformers.utils.logging.disable_progress_bar()
    accelerator = make_accelerator(recipe.train)
    train, main = recipe.train, accelerator.is_main_process
    folder = RunFolder(recipe.output)
    with ExitStack() as stack:
        if main:
            folder = RunFolder.create_or_attach(recipe.output, recipe.to_yaml())
            progress = Progress(train.steps, train.algorithm)
            stack.callback(progress.close)
            folder.on_log = progress.update
        renderer = load_renderer(recipe.model, recipe.rollout.parser, tools=bool(recipe.tools or recipe.mcp_servers))
        tokenizer = renderer.tokenizer
        # a checkpoint carries the template that it was trained with
        tokenizer.chat_template = renderer.chat_template
        common: dict[str, Any] = {
            "tokenizer": tokenizer,
            "log": folder.log,
            "checkpoint_info": {"renderer": renderer.info},
        }
        saved = Path(train.from_trajectories) if train.from_trajectories else None
        if train.algorithm == "sft":
            rows = None
            if main and saved:
                rows = saved_rows(saved)
            elif main and recipe.data:
                rows = conversation_rows(load_tasks(recipe.data), renderer)
            result = train_sft(recipe, accelerator, folder.checkpoints, rows=rows, **common)
        else:
            source: GroupSource | None = None
            sync: WeightSync | None = None
            canary: Canary | None = None
            servers: list[ServerControl] = []
            total = train.steps * train.batch_size
            if not saved:
                # every rank computes the trainer's scores: the policy may be sharded
                longest = min(recipe.server.max_model_len, recipe.rollout.max_total_tokens) - 1
                special = set(tokenizer.all_special_ids)
                vocabulary = [token for token in range(len(tokenizer)) if token not in special]
                canary = Canary(servers, canary_rows(vocabulary, longest, recipe.seed), recipe.model.dtype)
            if main and saved:
                source = SavedGroups(saved, total)
            elif main and canary:
                servers += [ServerControl(url, recipe.server.api_key_env) for url in recipe.server.urls]
                for server in servers:
                    server.require(control_routes(recipe))
                # the process id tells this attempt's adapters from those that an earlier one left on the server
                backend = make_sync(recipe, servers, folder.path / "sync", recipe.name, os.getpid())
                sync = patient = PatientSync(backend, canary, recipe.server.retry_seconds)
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
                )
                stack.callback(worker.close)
            result = train_grpo(
                recipe, accelerator, folder.checkpoints, source=source, sync=sync, canary=canary, **common
            )
        if main:
            figures = {f"{name}_before": value for name, value in _headline(result.before).items()}
            figures |= {f"{name}_after": value for name, value in _headline(result.after).items()}
            folder.write_summary(
                {
                    **figures,
                    "steps": result.steps,
                    "train_wall_seconds": result.seconds,
                    "seed": recipe.seed,
                    "checkpoint": str(result.checkpoint),
                }
            )
        accelerator.end_training()


def _headline(figures: dict[str, float]) -> dict[str, float]:
    """The figures of an evaluation that a summary shows: success (sampled), greedy success, reward (sampled)."""
    names = {"success": "eval/sampled/success", "greedy": "eval/greedy/success", "reward": "eval/sampled/reward"}
    return {short: figures[name] for short, name in names.items() if name in figures}


def main() -> int:
    """Run the command line; returns the exit status: 0 done, 1 failed, 2 the recipe or launch is wrong."""
    lifeline.follow_parent()
    # so that the worker and the progress display are closed in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        recipe = load(sys.argv[1:])
    except (RecipeError, RunFolderError) as error:
        print(error, file=sys.stderr)
        return 2
    from rollout.delivery import WorkerDiedError
    from trainers.launch import LaunchError
    from trainers.server_control import SyncError

    try:
        train(recipe)
    except (LaunchError, RunFolderError) as error:
        # every rank finds it; one says it
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return 2
    except (WorkerDiedError, SyncError, ValueError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
