"""Train one recipe on the processes that accelerate started: `accelerate launch -m agentfactory.train RECIPE [key=value
...]`, or `accelerate launch train.py ...` in a checkout.

Reinforcement learning needs an inference server at `server.url` (`agentfactory serve RECIPE`); rank 0 starts the
rollout worker. `--resume [PATH]` continues the run in `output`. `agentfactory train RECIPE` does all of this, and runs
the stages of a staged recipe: it starts this module with an assignment. `launching/trainer_main.py` does the work."""

from agentfactory.base.user_code import import_path

if __name__ == "__main__":
    import_path.start_folder_last()

import gc
import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from agentfactory.launching.run_results import MostChainsDroppedError
from agentfactory.launching.launch_plan import Assignment
from agentfactory.launching import add_resume_option, settle_resume
from agentfactory.launching.run_folder import RunFolderError
from agentfactory.recipe.checks import check_recipe, runs_chains
from agentfactory.recipe.composition import COMMAND_LINE
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.supervised import DiedFromInside, Signalled, exited_by, supervised
from agentfactory.base.files.disk import DiskError
from agentfactory.base.run_notices import doing, heard
from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import spare_loopback
from agentfactory.base.user_code import watch
from agentfactory.base.user_code.import_path import append_folders
from agentfactory.trainers.config import Symptom

STOPPED, MOSTLY_DROPPED = 3, 4
"""Exit statuses if a symptom of train.stop_when ended the run, and if most of its chains were dropped."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line. Raises SettingError."""
    parser = argparse.ArgumentParser(prog="python -m agentfactory.train")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    # used by the launcher in place of all other arguments
    parser.add_argument("--assignment", type=Path, help=argparse.SUPPRESS)
    add_resume_option(parser)
    options, rest = parser.parse_known_args(arguments)
    options.overrides += rest
    settle_resume(options)
    others = options.recipe is not None or options.overrides or options.resume is not None
    # the launcher has locked the run folder and rewound it to the checkpoint
    if options.assignment is not None and (others or parent_watch.VARIABLE not in os.environ):
        problem = "it is for processes that `agentfactory train` starts, without other arguments"
        raise SettingError("--assignment", problem, "run `agentfactory train RECIPE`", source=COMMAND_LINE)
    return options


def load(options: argparse.Namespace) -> tuple[Recipe, str | Assignment | None]:
    """Return the recipe, and the checkpoint to resume or the assignment, if any. Raises SettingError."""
    if options.assignment is not None:
        assignment = Assignment.wait_for(options.assignment)
        append_folders(assignment.recipe.import_path)
        return assignment.recipe, assignment
    if options.recipe is None:
        fix = "accelerate launch -m agentfactory.train RECIPE [key=value ...]"
        raise SettingError("RECIPE", "missing", fix, source=COMMAND_LINE)
    recipe = load_recipe(options.recipe, options.overrides)
    check_recipe(recipe)
    for fault in _faults(recipe):
        raise SettingError(*fault, source=options.recipe)
    assert isinstance(recipe, Recipe)
    return recipe, options.resume


def _faults(recipe: Recipe | StagedRecipe) -> Iterator[tuple[str, str, str]]:
    if isinstance(recipe, StagedRecipe):
        yield "stages", "train.py trains one stage", "run `agentfactory train` on it"
        return
    if runs_chains(recipe, "train") and recipe.server.url is None:
        fix = "run `agentfactory serve` and pass server.url=ADDRESS, or run `agentfactory train`"
        yield "server.url", "missing: there is no server to roll out on", fix
    if recipe.model.lora is not None and recipe.model.lora.merge:
        problem = "the adapter of model.lora.from must be merged first, and train.py does not merge"
        fix = "run `agentfactory train` on the recipe, or `agentfactory export` the adapter and name that as model.path"
        yield "model.lora.merge", problem, fix
    if recipe.prepare and not (recipe.output / "prepared").exists():
        yield "prepare", "has not run yet", "run `agentfactory train` on the recipe"


def _say_on_rank_0(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # the launcher shows stdout, and logs stderr
        print(text, flush=True)


def _signalled(number: int, frame: FrameType | None) -> NoReturn:
    raise Signalled(number)


def main() -> int:
    try:
        return _main()
    except Signalled as error:
        return error.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        if (why := exited_by(error)) is None:
            raise
        print_error(why)
        return 1


def _main() -> int:
    """Return the exit status: 0 success, 1 failure, 2 invalid recipe or launch, 3 stopped by train.stop_when, 4 most
    chains dropped, 128 + the signal's number if stopped by a signal."""
    parent_watch.follow_parent()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun signals the whole group: this process would get each signal twice, the second by its supervisor
        os.setpgid(0, 0)
    spare_loopback(os.environ)
    # exit through the interpreter, so that the worker and the progress display are closed in order
    signal.signal(signal.SIGTERM, _signalled)
    # imports create no garbage, but the collector would take a fifth of their time
    gc.disable()
    try:
        options = parse(sys.argv[1:])
        if options.assignment is not None:
            # takes seconds, so import it while the launcher waits for the server
            with heard(_say_on_rank_0), doing("the trainer imports its libraries"):
                importlib.import_module("agentfactory.launching.trainer_main")
        recipe, asked = load(options)
    except (SettingError, RunFolderError) as error:
        print(error, file=sys.stderr)
        return 2
    # torch and transformers take seconds to import; report a broken recipe before that
    from agentfactory.launching.reach_early import wait_for_servers
    from agentfactory.launching.trainer_main import train
    from agentfactory.rollout.workers.worker_socket import WorkerDiedError
    from agentfactory.trainers.processes.accelerator import LaunchError
    from agentfactory.trainers.sync.server_control import SyncError

    gc.freeze()
    gc.enable()
    try:
        if runs_chains(recipe, "train"):
            with heard(_say_on_rank_0):
                wait_for_servers(recipe)
        ended_by = train(recipe, asked)
    except MostChainsDroppedError as error:
        print_error(error)
        return MOSTLY_DROPPED
    except (LaunchError, RunFolderError, SettingError) as error:
        # all ranks find the error, except one about a machine's disk; one rank of each machine prints it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # the launcher repeats a single line, and messages of other libraries may span several
            print_error(" ".join(str(error).split()))
        return 2
    except (WorkerDiedError, SyncError, DiskError, ValueError, FloatingPointError) as error:
        print_error(error)
        return 1
    if isinstance(ended_by, Symptom):
        return STOPPED
    return 128 + ended_by if ended_by else 0


def print_error(error: Exception | str) -> None:
    """Print the error that ended this process, with its rank if there are several, for the launcher."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    print(f"[rank{os.environ.get('RANK', '0')}]: {error}" if several else error, file=sys.stderr)


def leave(status: int) -> NoReturn:
    """End this process; one of several skips the interpreter's shutdown, in which a gloo thread could abort it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def supervised_main() -> int:
    watch.say_by(_say_on_rank_0)
    try:
        return supervised(main)
    except DiedFromInside as error:
        print_error(f"the trainer's process {error}")
        return 1
    except Signalled as error:
        return error.status


if __name__ == "__main__":
    leave(supervised_main())
