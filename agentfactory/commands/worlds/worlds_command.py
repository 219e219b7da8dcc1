"""`agentfactory worlds list | show | try | serve`: installed worlds, without a model."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring

from agentfactory.base.config import fields_of
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.user_code.entry_points import SOURCES, WORLDS, registered
from agentfactory.base.user_code.loading import load_object
from agentfactory.base.user_code.watch import limited
from agentfactory.commands.tools_command import signature_of
from agentfactory.commands.worlds.subject import (
    catalogue,
    describe,
    first_line,
    open_subject,
    sources_of,
    world_and_source,
)
from agentfactory.commands.worlds.trial import read_calls
from agentfactory.recipe.reference import default_words, meaning, type_words
from agentfactory.rollout.config import TaskSource
from agentfactory.rollout.images.parts import clean_row
from agentfactory.tools.environments.environment import is_environment, overrides, reset_schema
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.tool import is_tool

_FOR_VERIFIERS = Path(__file__).parent / "for_verifiers"
"""Folder of a module that needs verifiers, and nothing of AgentFactory."""


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run `list`, `show`, `try` or `serve`. Raises SettingError, WorldFailed, ToolInfrastructureError."""
    match options.action:
        case "list":
            if options.json:
                say(json.dumps([asdict(entry) for entry in catalogue()], indent=2, ensure_ascii=False))
            else:
                for entry in catalogue():
                    say(entry.line)
        case "show":
            _show(options.world, options.json, say)
        case "try":
            _try(options)
        case "serve":
            from agentfactory.commands.worlds.openenv_server import serve

            subject = open_subject(options.world, options.overrides, options.option)
            client = f"\nverifiers' taskset agentfactory-world is in {_FOR_VERIFIERS}"
            client = client if options.protocol == "verifiers" else ""
            run_interruptibly(serve(subject, options.host, options.port, options.api_key_env, say, client))


def _try(options: argparse.Namespace) -> None:
    from agentfactory.commands.worlds.trial import Episode, play

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


def _show(name: str, as_json: bool, say: Callable[[str], None]) -> None:
    world, chosen = world_and_source(name, ())
    with redirect_stdout(sys.stderr):
        found = load_object(world, Path.cwd(), prebuilt())
        sources = sources_of(world)
    label = world.rpartition(":")[2]
    described: dict[str, Any] = {
        "name": label,
        "about": first_line(found),
        "place": prebuilt().get(world, world),
        "tools": [spec.to_openai() for spec in _specs(found)],
        "options": _options(found),
        "row": _row_fields(found),
        "reward": _reward(found),
        "tasks": {source: _fields(kind) for source, kind in sources.items()},
        "installed": [
            asdict(describe(kind, each, places[each]))
            for kind, group in (("world", WORLDS), ("tasks", SOURCES))
            for places in [registered(group)]
            for each in ([world] if kind == "world" else [*sources])
            if each in places
        ],
    }
    described["recipe"] = snippet(label, world, found, chosen, sources)
    if as_json:
        say(json.dumps(described, indent=2, ensure_ascii=False, default=str))
        return
    say(f"{label}: {described['about'] or 'no docstring'}\n    {described['place']}")
    for entry in described["installed"]:
        needs = ", ".join(entry["needs"]) or "nothing that its package does not require"
        say(f"    {entry['kind']} {entry['name']}: {entry['package']}; needs {needs}")
        say(f"    missing: {entry['missing']}" if entry["missing"] else "    installed")
    say("\ntools")
    for spec in _specs(found):
        say(f"    {spec.name}({signature_of(spec)})")
        for line in spec.description.splitlines():
            say(f"        {line}".rstrip())
    _say_table("options (constructor arguments)", described["options"], say)
    for source, fields in described["tasks"].items():
        _say_table(f"tasks: fields of data.{source}", fields, say)
    if not sources:
        fields = described["row"]
        say(f"\ntasks: no task source; its rows have {', '.join(fields)}" if fields else "\ntasks: any rows")
    say(f"\nreward: {described['reward']}")
    say(f"\na recipe that begins with it\n\n{described['recipe']}")


def _say_table(title: str, fields: list[dict[str, str]], say: Callable[[str], None]) -> None:
    say(f"\n{title}" + ("" if fields else ": none"))
    for field in fields:
        default = f" = {field['default']}" if field["default"] != "required" else ", required"
        say(f"    {field['name']}: {field['type']}{default}")
        for line in field["about"].splitlines():
            say(f"        {line}".rstrip())


def _specs(found: Any) -> list[ToolSpec]:
    if is_environment(found):
        names = dict.fromkeys(name for base in reversed(found.__mro__) for name in vars(base))
        return [method.spec for name in names if is_tool(method := getattr(found, name))]
    return [found.spec] if is_tool(found) else []


def _options(found: Any) -> list[dict[str, str]]:
    # Any, because the class may be any
    constructor: Any = getattr(found, "__init__", None) if isinstance(found, type) else None
    if constructor is None or constructor is object.__init__:
        return []
    parsed = [parse_docstring(each.__doc__ or "", DocstringStyle.GOOGLE) for each in (found, constructor)]
    about = {each.arg_name: each.description or "" for one in parsed for each in one.params}
    parameters = [*inspect.signature(found).parameters.values()]
    return [
        {
            "name": each.name,
            "type": "any" if each.annotation is each.empty else inspect.formatannotation(each.annotation),
            "default": "required" if each.default is each.empty else json.dumps(each.default, default=repr),
            "about": about.get(each.name, ""),
        }
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _fields(source: type[TaskSource]) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "type": _type(field).replace("`", ""),
            "default": "required" if field.is_required() else default_words(field).strip("`") or "its own defaults",
            "about": meaning(field),
        }
        for name, field in fields_of(source).items()
    ]


def _type(field: Any) -> str:
    try:
        return type_words(field.annotation, field.metadata)
    except (KeyError, IndexError):  # a type that our own recipes do not use
        return inspect.formatannotation(field.annotation)


def _row_fields(found: Any) -> list[str]:
    return [*dict.fromkeys(["question", *(reset_schema(found)["required"] if is_environment(found) else [])])]


def _reward(found: Any) -> str:
    if is_environment(found) and overrides(found, "reward"):
        return "its own"
    return "none of its own; name one in the recipe's `rewards`"


def snippet(label: str, world: str, found: Any, chosen: str | None, sources: dict[str, type[TaskSource]]) -> str:
    """Return a recipe that begins with the world, as YAML; `...` stands for a value to fill in."""
    recipe: dict[str, Any] = {"model": {"path": "Qwen/Qwen2.5-3B-Instruct"}}
    needed = {each["name"]: "..." for each in _options(found) if each["default"] == "required"}
    source = sources.get(chosen or "") or next(iter(sources.values()), None)
    if source is None:
        recipe["data"] = {"path": "tasks.jsonl"}
    else:
        name = chosen or next(iter(sources))
        recipe["data"] = {name: {key: "..." for key, field in fields_of(source).items() if field.is_required()}}
    if needed:
        recipe["mcp_servers"] = {label: {"module": world, "options": needed}}
    elif source is None:
        recipe["tools"] = [world]
    if not _reward(found).startswith("its own"):
        recipe["rewards"] = [{"reward": "my_rewards.py:reward"}]
    recipe["train"] = {"steps": 100}
    text = yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=100)
    rows = f"# tasks.jsonl: a row per line, with {', '.join(_row_fields(found))}\n" if source is None else ""
    return rows + text
