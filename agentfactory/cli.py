"""The `agentfactory` command: train, serve, rollout, eval, export, tools."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory import check_own_packages

if TYPE_CHECKING:
    from agentfactory.recipe import Recipe, StagedRecipe

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: done; something failed; a bad recipe or command line, with nothing written; Ctrl-C or SIGTERM."""

_COMMANDS = {
    "train": "prepare, start the server, train every stage; leaves a run folder",
    "serve": "serve the recipe's model in the foreground",
    "rollout": "run chains on the recipe's data and save them, without training",
    "eval": "evaluate a model or checkpoint on the recipe's held-out tasks",
}


_TOOLS = {
    "list": "print the tools that a model would see",
    "call": "make one call, as a chain of its own",
    "check": "open every server, and try its environment",
    "serve": "serve FILE.py[:NAME] ... over MCP; its options: `agentfactory tools serve --help`",
}
_EXPORT = "make of a checkpoint a folder to use or to share: the model, an adapter merged into it, or the adapter"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    try:
        check_own_packages()
    except ImportError as error:
        return _refuse(error)
    given = sys.argv[1:] if arguments is None else [*arguments]
    if given[:2] == ["tools", "serve"]:
        return _serve_tools(given[2:])
    options = _parse(given)
    match options.command:
        case "export":
            return _export(options)
        case "tools":
            return _tools(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    # the schema is imported after the check, and without torch
    from agentfactory.recipe import RecipeError, load_recipe

    try:
        # a recipe may be looked at on another machine than the one that it is for
        lacks: list[str] | None = [] if options.dry_run else None
        recipe = load_recipe(options.recipe, options.overrides, options.command, lacks)
    except RecipeError as error:
        return _refuse(error)
    if options.dry_run:
        return _show(recipe, options.command, lacks or [])

    from agentfactory import launcher
    from agentfactory.processes import ChildFailed, Terminated
    from agentfactory.run_folder import RunFolderError

    try:
        match options.command:
            case "train":
                launcher.train(recipe, options.overwrite, options.resume, _say)
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
        goes_on = "; go on with --resume" if options.command == "train" else ""
        return _end(f"interrupted by {by}; run folder {recipe.output}{goes_on}", INTERRUPTED)
    except ChildFailed as error:
        return _end(f"failed: {error}; run folder {recipe.output}", FAILED)
    except Exception as error:
        traceback.print_exc()
        return _end(f"failed: {type(error).__name__}: {error}; run folder {recipe.output}", FAILED)
    return OK


def _show(recipe: "Recipe | StagedRecipe", command: str, lacks: Sequence[str]) -> int:
    """Print the resolved recipe, and as comments what this machine lacks, where its processes go, and what memory they
    take."""
    from agentfactory.placement.placed import place
    from agentfactory.processes import ChildFailed
    from agentfactory.recipe import RecipeError, StagedRecipe

    print(recipe.to_yaml(), end="")
    print("".join(f"# not installed here: {lack}\n" for lack in dict.fromkeys(lacks)), end="", flush=True)
    if command not in ("train", "serve"):
        return OK
    stages = recipe.stages if isinstance(recipe, StagedRecipe) else [recipe]
    if command == "serve":
        stages = stages[-1:]
    try:
        placements = place(stages, "train" if command == "train" else "serve")
    except ChildFailed as error:
        return _end(f"failed: {error}", FAILED)
    refused: RecipeError | None = None
    for stage, placement in zip(stages, placements, strict=True):
        said = placement.table if placement else f"its memory is planned once {stage.model.path} is there"
        if said:
            print("".join(f"# {line}\n" for line in f"{stage.name}: {said}".splitlines()), end="", flush=True)
        if placement and placement.refused and refused is None:
            refused = RecipeError(stage.name, *placement.refused)
    return _refuse(refused) if refused else OK


def _export(options: argparse.Namespace) -> int:
    from agentfactory.export import ExportError, export

    try:
        export(options.checkpoint, options.output, options.adapter, options.push, _say)
    except ExportError as error:
        return _refuse(error)
    return OK


def _serve_tools(arguments: Sequence[str]) -> int:
    from tools import serve

    serve.main(arguments, "agentfactory tools serve")
    return OK


def _tools(options: argparse.Namespace) -> int:
    from agentfactory.recipe import RecipeError
    from agentfactory.tools_command import ToolsCommandError, ToolsFailed, run

    try:
        run(options)
    except (RecipeError, ToolsCommandError) as error:
        return _refuse(error)
    except ToolsFailed as error:
        return _end(str(error), FAILED)
    except KeyboardInterrupt:
        return _end("interrupted by Ctrl-C", INTERRUPTED)
    return OK


def add_resume_option(parser: argparse._ActionsContainer) -> None:
    """The option --resume [PATH]; `settle_resume` corrects what argparse makes of it."""
    about = "go on with the run in `output`, from this checkpoint of it (default: the newest)"
    parser.add_argument("--resume", nargs="?", const="auto", metavar="PATH", help=about)


def settle_resume(options: argparse.Namespace) -> None:
    """A key=value after a bare --resume is an override, not a path."""
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "auto"


def json_object(text: str) -> dict[str, Any]:
    """What a JSON object on the command line says; raises argparse.ArgumentTypeError where it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _add_tools(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = "list, call, check or serve a recipe's tools, without a model"
    parser = commands.add_parser("tools", help=about, description=f"{about[0].upper()}{about[1:]}.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _TOOLS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == "serve":
            continue  # its options are parsed by tools.serve
        action.add_argument("recipe", metavar="RECIPE", help="a YAML file; it needs no model")
        if name == "call":
            action.add_argument("tool", metavar="TOOL", help="its name, as `list` prints it")
            action.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="one JSON object, or key=value ...")
            action.add_argument("--output", type=Path, metavar="FILE", help="save the image of the result")
        else:
            action.add_argument("overrides", metavar="key=value", nargs="*", help="such as limits.calls=8")
        if name == "list":
            action.add_argument("--json", action="store_true", help="as a model is told them")
        else:
            about = "data row for the environments' reset; default: the first of the recipe's data"
            action.add_argument("--task", type=json_object, metavar="JSON", help=about)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
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
            there = command.add_mutually_exclusive_group()
            there.add_argument("--overwrite", action="store_true", help="delete the run folder that is there")
            add_resume_option(there)
        if name == "eval":
            command.add_argument("--checkpoint", type=Path, metavar="PATH", help="evaluate this in place of model.path")
    command = commands.add_parser("export", help=_EXPORT, description=f"{_EXPORT[0].upper()}{_EXPORT[1:]}.")
    command.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="such as runs/NAME/checkpoints/step-000080"
    )
    command.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder to make")
    command.add_argument("--adapter", action="store_true", help="the adapter alone, not merged into its base")
    command.add_argument(
        "--push", metavar="REPO", help="upload it to this repository of the hub (a new one is private)"
    )
    _add_tools(commands)
    # argparse leaves overrides that come after an option in the rest
    options, rest = parser.parse_known_args(arguments)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "export":
        if rest:
            command.error(f"unrecognized arguments: {' '.join(rest)}")
        return options
    (options.arguments if getattr(options, "action", None) == "call" else options.overrides).extend(rest)
    if options.command == "train":
        settle_resume(options)
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
