"""The `agentfactory` command: the function and the exit status of each subcommand."""

import argparse
import importlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentfactory.base.errors import is_interruption
from agentfactory.base.files.untrusted_files import terminal_text
from agentfactory.base.http.proxies import spare_loopback
from agentfactory.base.processes.supervised import DiedFromInside, Signalled, exited_by, supervised
from agentfactory.base.run_notices import Notices, heard
from agentfactory.base.user_code.entry_points import SERVICES, load_named, registered
from agentfactory.commands.options import answer_completion, completion_script, parse

if TYPE_CHECKING:
    from agentfactory.base.errors import SettingError
    from agentfactory.recipe.schema import Recipe, StagedRecipe

OK, FAILED, REFUSED, STOPPED, MOSTLY_DROPPED, UNCHECKED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
"""Exit statuses: done; something failed; a bad recipe or command line, with nothing written; a symptom of
train.stop_when; done, but most chains were dropped; no fault, but not everything was checked; Ctrl-C or SIGTERM."""

_WITHOUT_USER_CODE = ("new", "view", "export", "completion")
"""Commands that execute no code of a recipe; the process of any other one is supervised."""
_ADDRESS_SPACE = 4 * 2**30  # bytes of address space below which a run is likely to fail
_TRACEBACK_LINES = 16  # maximum lines of a traceback to print, so that it fits on a screen with the error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. Raises KeyboardInterrupt for Ctrl-C before the command begins."""
    if "_ARGCOMPLETE" in os.environ:
        answer_completion()
    given = sys.argv[1:] if arguments is None else [*arguments]
    spare_loopback(os.environ)
    if given[:2] == ["tools", "serve"]:
        from agentfactory.tools import serve

        serve.main(given[2:], "agentfactory tools serve")
        return OK
    options = parse(given)
    if arguments is None and options.command not in _WITHOUT_USER_CODE:
        try:
            return supervised(partial(_execute_once, options))
        except DiedFromInside as error:
            return _end(f"failed: the process of `agentfactory {options.command}` {error}", FAILED)
        except Signalled as error:
            return _end(f"interrupted by {error}", INTERRUPTED)
    return _execute(options)


def _execute_once(options: argparse.Namespace) -> int:
    try:
        return _execute(options)
    except KeyboardInterrupt as error:
        is_second = isinstance(error.__context__, KeyboardInterrupt)
        return INTERRUPTED if is_second else _end("interrupted by Ctrl-C", INTERRUPTED)


def _execute(options: argparse.Namespace) -> int:
    try:
        for notice in filter(None, (_notice_of_tmpdir(), _notice_of_memory())):
            print(f"agentfactory: {notice}", file=sys.stderr, flush=True)
    except FileNotFoundError as error:
        return _end(f"TMPDIR: {error.strerror}; fix: set it to a folder with space that you can write", REFUSED)
    try:
        with _terminable():
            status = _COMMANDS.get(options.command, _run_module)(options)
            sys.stdout.flush()
            return status or OK
    except BaseException as error:  # user code may raise any, such as GeneratorExit
        return _ended_by(error)


def _ended_by(error: BaseException) -> int:
    after = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, KeyboardInterrupt):
        return _end(f"interrupted by {str(error) or 'Ctrl-C'}{after}", INTERRUPTED)
    if isinstance(error, SystemExit):
        if (why := exited_by(error)) is None:
            raise error
        return _end(f"failed: {why}", FAILED)
    if isinstance(error, BrokenPipeError) and not after:
        # the reader of our output, such as `head`, has gone: nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    # these imports do not load torch
    from agentfactory.base.errors import CommandFailed, SettingError
    from agentfactory.base.files.disk import DiskError
    from agentfactory.base.messages import ToolInfrastructureError
    from agentfactory.launching.child_processes import ChildFailed
    from agentfactory.launching.launcher import RunStopped
    from agentfactory.launching.placement import PlacementError
    from agentfactory.launching.run_folder import RunFolderError
    from agentfactory.launching.run_results import MostChainsDroppedError

    match error:
        case SettingError() | RunFolderError():
            return _end(str(error), REFUSED)
        case CommandFailed():
            return _end(str(error), error.status)
        case ToolInfrastructureError() if not after:
            return _end(str(error), FAILED)
        case ChildFailed() | PlacementError() | DiskError():
            return _end(f"failed: {error}{after}", FAILED)
        case MostChainsDroppedError():
            return _end(f"most chains were dropped: {error}{after}", MOSTLY_DROPPED)
        case RunStopped():
            return _end(f"stopped: {error}{after}", STOPPED)
    if is_interruption(error):
        return _end("interrupted by Ctrl-C", INTERRUPTED)
    _show_traceback()
    return _end(f"failed: {type(error).__name__}: {error}{after}", FAILED)


def _notice_of_memory() -> str | None:
    """Return a notice if the limit of address space leaves little more than what torch's libraries map, else None."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= _ADDRESS_SPACE:
        return None
    what = f"each process may map {limit / 2**30:.1f} GiB (ulimit -v), and the libraries alone map 1.2 GiB"
    return f"{what}; fix: raise it to 8 GiB and the size of the model, or limit memory by a control group"


def _notice_of_tmpdir() -> str | None:
    """Return a notice if temporary files do not go to TMPDIR. Raises FileNotFoundError if none can be written."""
    asked, used = os.environ.get("TMPDIR"), tempfile.gettempdir()
    if not asked or os.path.abspath(asked) == used:
        return None
    problem = "is full or cannot be written" if os.path.isdir(asked) else "is not a folder"
    return f"TMPDIR={asked} {problem}: temporary files go to {used}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind a command like Ctrl-C; commands with children replace this handler in `Children`."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int | None:
    from agentfactory.launching.progress import tell_information
    from agentfactory.launching.run_folder import check_run_of, is_run
    from agentfactory.recipe.checks import check_recipe
    from agentfactory.recipe.load import load_recipe

    if options.command == "eval" and options.url is not None:
        # no server is started, so none needs to be installed
        options.overrides.append(f"server.url={options.url}")
    # a dry run may happen on another machine than the one that the recipe is for
    lacks: list[SettingError] | None = [] if options.dry_run else None
    check_run_of(Path(options.recipe).expanduser())
    # a dry run's stdout is the recipe
    with tell_information(partial(print, file=sys.stderr)):
        recipe = load_recipe(options.recipe, options.overrides, options.command)
        check_recipe(recipe, options.command, lacks)
    if options.dry_run:
        _show(recipe, options, lacks or [])
        return OK

    from agentfactory.commands import server_commands
    from agentfactory.launching import launcher
    from agentfactory.launching.served_weights import trained_in
    from agentfactory.recipe.composition import display, recipe_file

    folder, run = display(recipe.output), recipe_file(options.recipe, Path.cwd()).parent
    with heard(_say) as say:
        try:
            match options.command:
                case "train":
                    launcher.train(recipe, options.overwrite, options.resume, say)
                case "serve":
                    # a manually started trainer begins with the recipe's own model
                    checkpoint = None if options.chat is None else trained_in(run, recipe, options.overrides)
                    server_commands.serve(recipe, checkpoint, say, options.chat, options.service, options.port)
                case "rollout":
                    server_commands.roll_out(recipe, trained_in(run, recipe, options.overrides), say)
                case "eval":
                    asked = {name: getattr(options, name) for name in ("model", "url", "samples", "beside")}
                    named = options.checkpoint or options.model or options.url
                    checkpoint = options.checkpoint if named else trained_in(run, recipe, options.overrides)
                    server_commands.evaluate(recipe, checkpoint, say, **asked)
        except KeyboardInterrupt as error:
            if recipe.output.exists():
                error.add_note(f"run folder {folder}")
            if options.command == "train" and is_run(recipe.output):
                error.add_note("continue with --resume")
            raise
        except Exception as error:
            error.add_note(f"run folder {folder}")
            raise
    return OK


def _show(recipe: "Recipe | StagedRecipe", options: argparse.Namespace, lacks: "Sequence[SettingError]") -> None:
    from agentfactory.launching.launch_plan import describe_memory, plan_run
    from agentfactory.launching.placement import place
    from agentfactory.launching.progress import tell_information
    from agentfactory.launching.reach_early import check_hub
    from agentfactory.launching.run_folder import RunFolderError, check_free
    from agentfactory.recipe import checks
    from agentfactory.recipe.schema import stages_of
    from agentfactory.rollout.config import distinct
    from agentfactory.rollout.model_hub import OutOfReach, has_tokenizer

    def comment(text: str) -> None:
        print("".join(f"# {line}\n" for line in text.splitlines()), end="", flush=True)

    print(recipe.to_yaml(), end="")
    for lack in dict.fromkeys(map(str, lacks)):
        comment(f"not installed here: {lack}")
    refused: SettingError | None = None
    try:
        try:
            check_hub(recipe, options.command)
        except OutOfReach as error:
            comment(f"would be refused here: {error}")
        for stage in stages_of(recipe):
            for unchecked in checks.try_sources(stage, options.command):
                comment(f"not checked here: {unchecked}")
            trains, found = options.command == "train", None
            if (trains or checks.runs_chains(stage, options.command)) and has_tokenizer(stage.model.path):
                for part in distinct(checks.parts_of(stage)):
                    of = f", source {part.name}" if part.name else ""
                    with checks.part_named(part):
                        found = checks.try_template(part.recipe)
                    comment(f"tool calls in {stage.name}{of}: {found['parser']}; rows: {found['choice']}")
            if trains and (found is not None or stage.model.lora is not None):
                # it imports transformers
                with tell_information(comment, Notices()):
                    load_named("agentfactory.placement.meta_model:check_model")(stage, found)
        if options.command == "train":
            for stage in stages_of(recipe):
                for doubt in checks.doubts(stage):
                    comment(f"warning: {doubt}")
            plan = plan_run(recipe, options.resume, options.overwrite)
            for line in plan.describe():
                comment(line)
            # a lack of this machine alone is no fault: the recipe may be for another one
            refused = next((stage.refusal for stage in plan.due if stage.placement.refused), None)
            if options.resume is None:
                check_free(recipe.output, options.overwrite)
        elif options.command == "serve":
            served = stages_of(recipe)[-1]
            if options.service is not None:
                served = load_named(registered(SERVICES)[options.service]).prepared(served)
            placement = place([served], "serve")[0]
            for line in describe_memory(served, placement):
                comment(line)
            refused = placement.refusal(served) if placement and placement.refused else None
    except RunFolderError as error:
        comment(f"would be refused: {error}")
    if refused is not None:
        raise refused


def _doctor(options: argparse.Namespace) -> int:
    look, run = None, load_named("agentfactory.commands.doctor:run")
    with heard(_say) as say:
        if options.sample is not None:
            from agentfactory.commands.sample_command import sample

            look = partial(sample, options.recipe, options.overrides, options.sample, say)
        return OK if run(options.recipe, options.overrides, say, coordinates=options.coordinates, look=look) else FAILED


def _run_module(options: argparse.Namespace) -> int:
    from agentfactory.launching.progress import tell_information

    module = _MODULES.get(options.command)
    home = options if module is None else importlib.import_module(f"agentfactory.{module}")
    try:
        with tell_information(partial(print, file=sys.stderr), Notices() if hasattr(options, "warns") else None):
            return int(home.run(options, _say) or OK)
    except KeyboardInterrupt as error:
        if hasattr(options, "goes_on"):
            error.add_note(options.goes_on)
        raise


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    **dict.fromkeys(("train", "serve", "rollout", "eval"), _run),
    "doctor": _doctor,
    "completion": lambda options: _say(completion_script(options.shell)),
}
_MODULES = {
    "new": "commands.new",
    "chat": "commands.chat",
    "export": "commands.export_command",
    "tools": "commands.tools_command",
}


def _say(text: str) -> None:
    print(terminal_text(text), flush=True)


def _show_traceback() -> None:
    """Print the end of the traceback; if it is longer, write all of it to a file and name that file."""
    text = traceback.format_exc()
    lines = text.splitlines()
    if len(lines) > _TRACEBACK_LINES:
        with tempfile.NamedTemporaryFile("w", prefix="agentfactory-", suffix=".log", delete=False) as file:
            file.write(text)
        lines = [f"the whole traceback: {Path(file.name)}", *lines[-_TRACEBACK_LINES:]]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end(text: str, status: int) -> int:
    if sys.stdout.isatty():
        # a killed trainer could not restore the cursor
        print("\x1b[?25h", end="", flush=True)
    # a server's answer, or an exception of user code, may contain sequences that a terminal obeys
    print(f"agentfactory: {terminal_text(text)}", file=sys.stderr, flush=True)
    return status
