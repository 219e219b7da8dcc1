"""The command line of `agentfactory`: commands, options, and the examples that `--help` shows."""

import argparse
import difflib
import importlib
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.entry_points import COMMANDS, SERVICES, registered
from agentfactory.base.user_code.extras import DISTRIBUTION
from agentfactory.launching import add_resume_option, settle_resume


def completion_script(shell: str) -> str:
    """Return the script for the shell, which gets the completions at the cursor from `agentfactory`."""
    import argcomplete

    return argcomplete.shellcode(["agentfactory"], shell=shell)


def answer_completion() -> None:
    """Print the completions at the shell's cursor, and end the process."""
    import argcomplete

    parser, _ = make_parser()
    argcomplete.autocomplete(parser, default_completer=argcomplete.completers.FilesCompleter())


def complete_override(prefix: str, **_: Any) -> list[str]:
    """Return overrides that begin with `prefix`: names of fields, or after `=` the possible values of a field."""
    # imported here because the schema takes a moment to load, and argcomplete asks only at the cursor
    from agentfactory.recipe.field_errors import all_fields
    from agentfactory.recipe.schema import Recipe

    name, equals, _value = prefix.partition("=")
    fields = all_fields(Recipe)
    if equals:
        return [f"{name}={value}" for value in _values(fields.get(name))]
    sections = {field.rpartition(".")[0] for field in fields}
    return [f"{field}=" for field in fields if field not in sections]


def _values(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [member.value for member in annotation]
    if annotation in (bool, type(None)):
        return ["true", "false"] if annotation is bool else ["null"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    return [value for part in get_args(annotation) for value in _values(part)]


_ABOUT = {
    "new": "write a small working task: tool, reward, data, recipes, test",
    "doctor": "check what this machine has and lacks, in general or for a recipe",
    "train": "prepare, start the server, train every stage, write a run folder",
    "serve": "serve the recipe's model in the foreground",
    "rollout": "run chains on the recipe's data and save them, without training",
    "eval": "evaluate a model, a checkpoint or any chat endpoint on the recipe's held-out tasks",
    "chat": "talk to a run's last checkpoint, with its tools",
    "export": "turn a checkpoint into a folder to use or share: the model, with an adapter merged in, or the adapter",
    "tools": "list, call, check or serve a recipe's tools, without a model",
    "completion": "print the script that lets your shell complete commands, options and recipe fields",
}
_EXAMPLES = {
    "new": [
        "new word_problems",
        "new word_problems --output tasks/words",
        "new cloths --vision",
        "new aquarium --environment",
    ],
    "doctor": [
        "doctor",
        "doctor recipe.yaml",
        "doctor recipe.yaml server.url=http://127.0.0.1:8000",
        "doctor recipe.yaml --sample 32",
        "doctor recipe.yaml --coordinates server.url=http://127.0.0.1:8000",
    ],
    "train": [
        "train recipe.yaml",
        "train recipe.yaml train.learning_rate=1e-5 seed=1 output=runs/second",
        "train recipe.yaml --dry-run",
        "train recipe.yaml --resume",
    ],
    "serve": [
        "serve recipe.yaml server.port=8000",
        "serve runs/quickstart/recipe.yaml --chat",
        "serve recipe.yaml --as tinker",
    ],
    "rollout": ["rollout recipe.yaml data.limit=20"],
    "eval": [
        "eval recipe.yaml --samples 8",
        "eval runs/mine/recipe.yaml --checkpoint runs/mine/checkpoints/step-000100",
        "eval recipe.yaml --model Qwen/Qwen2.5-7B-Instruct",
        "eval recipe.yaml --url http://127.0.0.1:8000 --model served-name",
        "eval recipe.yaml --model models/teacher --beside runs/mine/eval",
    ],
    "chat": ["chat runs/mine", "chat runs/mine --checkpoint runs/mine/checkpoints/step-000100"],
    "export": [
        "export runs/mine --output model",
        "export runs/mine/checkpoints/step-000100 --output adapter --adapter",
    ],
    "tools": [
        "tools list recipe.yaml",
        "tools call recipe.yaml search query=treasure",
        "tools check recipe.yaml",
        "tools serve my_tools.py",
    ],
    "completion": [
        'eval "$(agentfactory completion bash)"   # in ~/.bashrc',
        'eval "$(agentfactory completion zsh)"   # in ~/.zshrc, after compinit',
        "agentfactory completion fish | source   # in ~/.config/fish/config.fish",
    ],
}
_TOOLS = {
    "list": "print the tools as a model gets them",
    "call": "make one call, in its own chain",
    "check": "open every server, and try its environment",
    "serve": "serve FILE.py[:NAME] ... over MCP; its options: `agentfactory tools serve --help`",
}
_STATUSES = """\
exit status:
  0    done
  1    something failed; for doctor: there are problems; for audit: something is wrong
  2    a bad command line or recipe: nothing was done
  3    train only: train.stop_when ended the run
  4    train, rollout, eval: done, but more than half of the chains were dropped or have no reward
  5    tools check only: no fault, but a part was not checked
  6    audit: warnings, and nothing wrong; rescore: the rewards disagree
  130  interrupted by Ctrl-C or SIGTERM
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse `arguments`. End the process with exit status 2 if they are invalid."""
    parser, commands = make_parser()
    if arguments and (near := difflib.get_close_matches(arguments[0], commands.choices, 1)) and near[0] != arguments[0]:
        parser.error(f"there is no command {arguments[0]!r}; did you mean {near[0]}?")
    # argparse returns overrides that follow an option in the rest
    options, rest = parser.parse_known_args(arguments)
    command = commands.choices[options.command]
    takes_call = options.command == "tools" and options.action == "call"
    takes_more = takes_call or hasattr(options, "overrides")
    if unknown := [argument for argument in rest if argument.startswith("-") or not takes_more]:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_call:
        words = [*options.words, *rest]
        options.overrides = list(itertools.takewhile(lambda word: "=" in word, words))
        tool, *options.arguments = words[len(options.overrides) :] or [None]
        if tool is None:
            options.refuse("the following arguments are required: TOOL")
        options.tool = tool
    elif takes_more:
        options.overrides.extend(rest)
    match options.command:
        case "train":
            settle_resume(options)
        case "doctor":
            if options.recipe and "=" in options.recipe and not Path(options.recipe).exists():
                command.error(f"name a recipe before {options.recipe}, which is an override")
            if (options.coordinates or options.sample is not None) and not options.recipe:
                command.error("--coordinates and --sample need a recipe: name one")
            if options.sample is not None and options.sample < 1:
                command.error(f"--sample: got {options.sample}; use at least 1 chain")
    return options


def make_parser() -> tuple[argparse.ArgumentParser, "argparse._SubParsersAction[argparse.ArgumentParser]"]:
    parser = argparse.ArgumentParser(
        prog="agentfactory",
        description="Reinforcement learning for agents that use tools.",
        epilog=f"`agentfactory COMMAND --help` shows examples.\n\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"agentfactory {importlib.metadata.version(DISTRIBUTION)}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
        lines = [line if name == "completion" else f"agentfactory {line}" for line in examples]
        return commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog="examples:\n" + "".join(f"  {line}\n" for line in lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    for name, about in _ABOUT.items():
        _add_options(name, add(name, about, _EXAMPLES[name]))
    _add_registered(add)
    return parser, commands


def _add_registered(add: Callable[[str, str, Sequence[str]], argparse.ArgumentParser]) -> None:
    """Add the commands of extensions and of installed packages; print the error of one that fails."""
    places = {"view": "agentfactory.viewer.view_command"}
    try:
        places |= registered(COMMANDS)
    except SettingError as error:
        print(f"agentfactory: {error}", file=sys.stderr)
    for name, place in places.items():
        try:
            if name in _ABOUT:
                raise ValueError("AgentFactory has a command of this name")
            module = importlib.import_module(place)
            command = add(name, module.ABOUT, module.EXAMPLES)
            module.add_options(command)
            command.set_defaults(run=module.run)
        except Exception as error:  # boundary: third-party packages
            print(f"agentfactory: the command {name} cannot be loaded: {place}: {error!r}", file=sys.stderr)


def _add_options(name: str, command: argparse.ArgumentParser) -> None:
    if name in ("doctor", "train", "serve", "rollout", "eval"):
        command.add_argument("recipe", metavar="RECIPE", nargs="?" if name == "doctor" else None, help="a YAML file")
        about = "such as train.learning_rate=1e-5 seed=1 output=DIR"
        # without a default, argparse reports them as required
        overrides = command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=about)
        overrides.completer = complete_override  # type: ignore[attr-defined]
    if name in ("train", "serve", "rollout", "eval"):
        about = "resolve, validate and print the recipe; do nothing"
        command.add_argument("--dry-run", action="store_true", help=about)
    match name:
        case "serve":
            about = "also serve OpenAI's and Anthropic's chat APIs, on this separate port (default: a free one)"
            kinds = command.add_mutually_exclusive_group()
            kinds.add_argument("--chat", type=int, nargs="?", const=0, metavar="PORT", help=about)
            about = "serve training as well, by this API, at --port (default: a free one)"
            kinds.add_argument("--as", dest="service", choices=[*registered(SERVICES)], help=about)
            command.add_argument("--port", type=int, metavar="PORT", help="port of --as")
        case "doctor":
            about = "find out the image coordinates of the model on the server at server.url"
            command.add_argument("--coordinates", action="store_true", help=about)
            about = "run N chains of the training data first, and say what the model does: calls, formats, rewards, "
            about += "time"
            command.add_argument("--sample", type=int, metavar="N", help=about)
        case "new":
            command.add_argument("task", metavar="TASK", help="name of the task and of its Python file: a-z, 0-9 and _")
            about = "folder to create; default: TASK in the current folder"
            command.add_argument("--output", type=Path, metavar="DIR", help=about)
            about = "a task with images: pictures, a tool that returns one, a vision-language model"
            kinds = command.add_mutually_exclusive_group()
            kinds.add_argument("--vision", dest="kind", action="store_const", const="vision", help=about)
            about = "a world with state: an Environment with its tool and reward"
            kinds.add_argument("--environment", dest="kind", action="store_const", const="environment", help=about)
            command.set_defaults(kind="text")
        case "train":
            there = command.add_mutually_exclusive_group()
            there.add_argument("--overwrite", action="store_true", help="delete the existing run folder")
            add_resume_option(there)
        case "eval":
            _add_eval(command)
        case "chat":
            command.add_argument("run", metavar="RUN", type=Path, help="a run folder, such as runs/quickstart")
            about = "checkpoint to talk to; default: the run's last"
            command.add_argument("--checkpoint", type=Path, metavar="PATH", help=about)
        case "export":
            _add_export(command)
        case "tools":
            _add_tools(command)
        case "completion":
            command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that will read the script")


def _add_eval(command: argparse.ArgumentParser) -> None:
    about = "evaluate this checkpoint instead of model.path"
    command.add_argument("--checkpoint", type=Path, metavar="PATH", help=about)
    about = "evaluate this model, a folder or a hub name, instead of model.path; with --url: name of a served model"
    command.add_argument("--model", metavar="NAME_OR_PATH", help=about)
    about = "use this server, AgentFactory's own or any OpenAI-compatible chat endpoint, and start none"
    command.add_argument("--url", metavar="URL", help=about)
    about = "sampled chains per task, instead of eval.samples"
    command.add_argument("--samples", type=int, metavar="K", help=about)
    about = "also show the differences to this evaluation of the same tasks: the run folder of an earlier `eval`"
    command.add_argument("--beside", type=Path, metavar="RUN", help=about)


def _add_export(command: argparse.ArgumentParser) -> None:
    about = "a run, whose last checkpoint is exported, or a checkpoint, such as runs/NAME/checkpoints/step-000080"
    command.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT", help=about)
    command.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder to create")
    command.add_argument("--adapter", action="store_true", help="export only the adapter, not merged into its base")
    about = "also upload it to this hub repository (a new one is private)"
    command.add_argument("--push", metavar="REPO", help=about)


def add_actions(
    command: argparse.ArgumentParser, texts: dict[str, str]
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in texts.items():
        about = f"{text[0].upper()}{text[1:]}."
        yield name, actions.add_parser(name, help=text, description=about, allow_abbrev=False)


def _add_tools(command: argparse.ArgumentParser) -> None:
    for name, action in add_actions(command, _TOOLS):
        if name == "serve":
            continue  # its options are parsed by agentfactory.tools.serve
        action.add_argument("recipe", metavar="RECIPE", help="a YAML file; it needs no model")
        if name == "call":
            words = "[key=value ...] TOOL [ARGUMENT ...]"
            action.usage = f"%(prog)s [-h] [--output FILE] [--task JSON] RECIPE {words}"
            about = "overrides such as limits.calls=8; TOOL as `list` prints it; its arguments: JSON, or key=value ..."
            action.add_argument("words", metavar=words, nargs="*", default=[], help=about)
            action.set_defaults(refuse=action.error)
            action.add_argument("--output", type=Path, metavar="FILE", help="save the result's image")
        else:
            about = "such as limits.calls=8"
            action.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=about)
        if name == "list":
            action.add_argument("--json", action="store_true", help="print the tools as JSON, as a model gets them")
            about = "print text and ids of the first prompt, a sample call and its result; needs the tokenizer"
            action.add_argument("--prompt", action="store_true", help=about)
        else:
            about = "data row to reset environments with; default: the first row of the recipe's data"
            action.add_argument("--task", type=json_object, metavar="JSON", help=about)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object on the command line; raise argparse.ArgumentTypeError if it is not one."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
