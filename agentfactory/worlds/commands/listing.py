"""`agentfactory worlds list | show`: the installed worlds, described without a model."""

import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentfactory.base.config import fields_of
from agentfactory.base.messages import ToolSpec
from agentfactory.base.user_code.entry_points import SOURCES, WORLDS, registered
from agentfactory.base.user_code.loading import load_object
from agentfactory.commands.tools_command import signature_of
from agentfactory.rollout.config import TaskSource
from agentfactory.tools.environments.environment import is_environment, overrides, reset_schema
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.tool import is_tool
from agentfactory.worlds.commands.subject import catalogue, describe, first_line, sources_of, world_and_source

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def list_worlds(as_json: bool, say: Callable[[str], None]) -> None:
    if as_json:
        say(json.dumps([asdict(entry) for entry in catalogue()], indent=2, ensure_ascii=False))
        return
    for entry in catalogue():
        say(entry.line)


def show(name: str, as_json: bool, say: Callable[[str], None]) -> None:
    """Say what a world offers. Raises SettingError for an unknown one."""
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


# ---- fields in words


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the sections in a type, each with the key suffix that leads to it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    origin = get_origin(annotation)
    key = "<name>" if origin is dict else "<n>" if origin is list else ""
    for part in get_args(annotation):
        for model, below in models_in(part):
            yield model, ".".join(filter(None, (key, below)))


def type_words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Describe a type for readers of YAML, such as `integer > 0 or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        first, *bounds = parts
        return type_words(first, [limit for each in bounds for limit in getattr(each, "metadata", [each])])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_words(part, metadata) for part in parts)
    if origin is Literal:
        return _one_of([str(part).lower() if isinstance(part, bool) else str(part) for part in parts])
    if origin is list:
        return f"list of {type_words(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_words(part) for part in parts) + "]"
    if origin is dict:
        return f"mapping of {type_words(parts[0])} to {type_words(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _one_of([member.value for member in annotation])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    limits = [(sign, getattr(limit, key, None)) for limit in (metadata or []) for key, sign in _BOUNDS.items()]
    found = [f"{sign} {value:g}" for sign, value in limits if value is not None]
    return " ".join([_WORDS[annotation], *([", ".join(found)] if found else [])])


def _one_of(values: list[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def default_words(field: FieldInfo) -> str:
    """Return a field's default as YAML, or that it is required; "" if fields below it, or loading, give the default."""
    if field.is_required():
        return "" if "default:" in (field.description or "") else "**required**"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`" if value != "" else "empty"


def docstring_of(documented: type) -> str:
    return " ".join(inspect.cleandoc(documented.__doc__ or "").split())


def meaning(field: FieldInfo) -> str:
    """Return a field's docstring, or else that of its section."""
    below = next((model for model, _ in models_in(field.annotation)), None)
    return field.description or (docstring_of(below) if below is not None else "")
