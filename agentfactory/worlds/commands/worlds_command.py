"""`agentfactory worlds list | show | try | serve`: installed worlds, without a model."""

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from agentfactory.commands.options import add_actions, json_object

ABOUT = "list, show, try or serve the installed worlds, without a model"
EXAMPLES = [
    "worlds list",
    "worlds show webshop",
    'worlds try scienceworld --row \'{"question": "Boil it.", "task": "boil", "variation": 0}\'',
    "worlds serve recipes/webshop/7b-full-8gpu.yaml --as openenv",
]
_ACTIONS = {
    "list": "print the installed worlds and task sources, and what each needs",
    "show": "print a world's tools, options, task fields, and a recipe that begins with it",
    "try": "play an episode of random or given calls, turn by turn",
    "serve": "serve a world or a recipe as an environment of other trainers",
}


def add_options(command: argparse.ArgumentParser) -> None:
    for name, action in add_actions(command, _ACTIONS):
        if name in ("list", "show"):
            action.add_argument("--json", action="store_true", help="print JSON")
        if name == "list":
            continue
        about = "a name that `worlds list` prints, or FILE.py:NAME" + ("" if name == "show" else ", or a recipe")
        action.add_argument("world", metavar="WORLD", help=about)
        if name == "show":
            continue
        about = "fields of the world's task source, or of the recipe"
        action.add_argument("overrides", metavar="field=value", nargs="*", default=[], help=about)
        about = "argument of the world's constructor"
        action.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help=about)
        if name == "try":
            about = "the task, for a world without a task source; default: the first task"
            action.add_argument("--row", type=json_object, metavar="JSON", help=about)
            about = 'make these calls instead of random ones: {"name": TOOL, "arguments": {...}} per line'
            action.add_argument("--calls", type=Path, metavar="FILE.jsonl", help=about)
            action.add_argument("--turns", type=int, metavar="N", default=10, help="random calls; default: 10")
            action.add_argument("--seed", type=int, metavar="N", default=0, help="seed of random calls; default: 0")
            about = "time limit of the start, the rows, the reset, and each call; default: 60"
            action.add_argument("--seconds", type=float, metavar="S", default=60.0, help=about)
        else:
            about = "protocol; `tools serve` serves plain MCP"
            action.add_argument("--as", dest="protocol", choices=("openenv", "verifiers"), required=True, help=about)
            about = "port; 0: a free one; default: 8000"
            action.add_argument("--port", type=int, metavar="N", default=8000, help=about)
            about = "address to listen on; any but loopback needs --api-key-env; default: 127.0.0.1"
            action.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=about)
            about = "environment variable with the key that clients must send; default: a random key"
            action.add_argument("--api-key-env", metavar="NAME", help=about)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run `list`, `show`, `try` or `serve`. Raises SettingError, WorldFailed, ToolInfrastructureError."""
    match options.action:
        case "list":
            from agentfactory.worlds.commands.listing import list_worlds

            list_worlds(options.json, say)
        case "show":
            from agentfactory.worlds.commands.listing import show

            show(options.world, options.json, say)
        case "try":
            _try(options)
        case "serve":
            from agentfactory.base.processes.interruption import run_interruptibly
            from agentfactory.worlds.commands.openenv_server import serve
            from agentfactory.worlds.commands.subject import open_subject

            subject = open_subject(options.world, options.overrides, options.option)
            client = f"\nverifiers' taskset agentfactory-world is in {Path(__file__).parent / 'for_verifiers'}"
            client = client if options.protocol == "verifiers" else ""
            run_interruptibly(serve(subject, options.host, options.port, options.api_key_env, say, client))


def _try(options: argparse.Namespace) -> None:
    from agentfactory.base.errors import SettingError
    from agentfactory.base.processes.interruption import run_interruptibly
    from agentfactory.base.user_code.watch import limited
    from agentfactory.rollout.images.parts import clean_row
    from agentfactory.worlds.commands.subject import open_subject
    from agentfactory.worlds.commands.trial import Episode, play, read_calls

    for name, least in (("turns", 1), ("seconds", 0.1)):
        if (value := getattr(options, name)) < least:
            raise SettingError(f"--{name}", f"got {value:g}", f"use at least {least:g}")
    calls = None
    if options.calls is not None:
        try:
            calls = read_calls(options.calls.read_text(encoding="utf-8"), str(options.calls))
        except (OSError, ValueError) as error:
            fix = 'give a file with a line {"name": TOOL, "arguments": {...}} per call'
            raise SettingError("--calls", str(error), fix) from None
    try:
        row = None if options.row is None else clean_row(options.row, Path.cwd())
    except ValueError as error:
        raise SettingError("--row", str(error), "correct it") from error
    episode = Episode(options.turns, options.seed, options.seconds, row, calls)
    with limited(options.seconds, "--seconds"), redirect_stdout(sys.stderr):
        subject = open_subject(options.world, options.overrides, options.option, options.seconds)
    run_interruptibly(play(subject, episode))
