"""The `agentfactory` command: train, serve, rollout, eval."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from agentfactory import check_own_packages

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: done; something failed; a bad recipe or command line, with nothing written; Ctrl-C or SIGTERM."""

_COMMANDS = {
    "train": "prepare, start the server, train every stage; leaves a run folder",
    "serve": "serve the recipe's model in the foreground",
    "rollout": "run chains on the recipe's data and save them, without training",
    "eval": "evaluate a model or checkpoint on the recipe's held-out tasks",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    try:
        check_own_packages()
    except ImportError as error:
        return _refuse(error)
    options = _parse(arguments)
    # the schema is imported after the check, and without torch
    from agentfactory.recipe import RecipeError, load_recipe

    try:
        recipe = load_recipe(options.recipe, options.overrides, options.command)
    except RecipeError as error:
        return _refuse(error)
    if options.dry_run:
        print(recipe.to_yaml(), end="")
        return OK

    from agentfactory import launcher
    from agentfactory.processes import ChildFailed, Terminated
    from agentfactory.run_folder import RunFolderError

    try:
        match options.command:
            case "train":
                launcher.train(recipe, options.overwrite, _say)
            case "serve":
                launcher.serve(recipe, _say)
            case "rollout":
                launcher.roll_out(recipe, _say)
            case "eval":
                launcher.evaluate(recipe, options.checkpoint, _say)
    except (RecipeError, RunFolderError) as error:
        return _refuse(error)
    except KeyboardInterrupt as error:
        by = str(error) if isinstance(error, Terminated) else "Ctrl-C"
        return _end(f"interrupted by {by}; run folder {recipe.output}", INTERRUPTED)
    except ChildFailed as error:
        return _end(f"failed: {error}; run folder {recipe.output}", FAILED)
    except Exception as error:
        traceback.print_exc()
        return _end(f"failed: {type(error).__name__}: {error}; run folder {recipe.output}", FAILED)
    return OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="agentfactory", description="Reinforcement learning for agents that use tools."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("recipe", metavar="RECIPE", help="a YAML file")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="such as train.learning_rate=1e-5 seed=1 output=DIR"
        )
        command.add_argument(
            "--dry-run", action="store_true", help="resolve, validate and print the recipe; do nothing"
        )
        if name == "train":
            command.add_argument("--overwrite", action="store_true", help="delete the run folder that is there")
        if name == "eval":
            command.add_argument("--checkpoint", type=Path, metavar="PATH", help="evaluate this in place of model.path")
    # argparse leaves overrides that come after an option in the rest
    options, rest = parser.parse_known_args(arguments)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _refuse(error: Exception) -> int:
    print(f"agentfactory: {error}", file=sys.stderr, flush=True)
    return REFUSED


def _end(text: str, status: int) -> int:
    if sys.stdout.isatty():
        # a trainer that was killed could not show the cursor again
        print("\x1b[?25h", end="", flush=True)
    print(f"agentfactory: {text}", file=sys.stderr, flush=True)
    return status
