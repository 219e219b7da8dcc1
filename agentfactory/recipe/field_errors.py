"""Explain pydantic's errors about a recipe: the field, the problem, and the probable fix."""

import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agentfactory.base.config import Choice, fields_of
from agentfactory.base.errors import SettingError, short
from agentfactory.recipe.choices import CHOICES, chosen
from agentfactory.recipe.removed_fields import fix_of_removed
from agentfactory.recipe.yaml_text import parse_yaml
from agentfactory.rollout.config import DataConfig, TaskSource, source_of

_DISTINCT = re.compile(r".*_.*|lr|r")
"""A last part of a dotted name that is enough to recognise it; `name`, `type` or `interval` are not."""


def setting_error(errors: ValidationError, data: Any, model: type[BaseModel]) -> SettingError:
    """Return the most informative of pydantic's errors about `data` that is not a valid `model`."""
    return SettingError(*_explain(min(errors.errors(include_url=False), key=_rank), data, model))


def _rank(error: Any) -> int:
    """Return the rank of an error: a wrong choice explains unknown options, and a misspelt key a missing one."""
    choosers = {"algorithm", *(kind.chooser for kind in CHOICES.values())}
    if "options" not in error["loc"] and not choosers.isdisjoint(error["loc"][-1:]):
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _explain(error: Any, data: Any, model: type[BaseModel]) -> tuple[str, str, str]:
    # keep the part of the location that is in the file: pydantic adds the members of a union
    keys: list[str] = []
    whole = data
    section, last = model, len(error["loc"]) - 1
    choice: tuple[type[Choice], str] | None = None
    for depth, key in enumerate(error["loc"]):
        inside = key in data if isinstance(data, dict) else isinstance(data, list) and key in range(len(data))
        if not inside and error["type"] != "missing":
            break
        keys.append(str(key))
        data = data[key] if inside else None
        if depth < last and key == "options" and issubclass(section, Choice):
            choice = section, chosen(whole, ".".join(keys[:-1]))
            section = section.options_type(choice[1]) or section
        elif depth < last and key in section.model_fields:
            section = _section(section.model_fields[key].annotation) or section
        elif depth < last and issubclass(section, DataConfig):
            section = source_of(str(key)) or section
    name = ".".join(keys)
    got, wanted, context = short(error["input"]), error["msg"], error.get("ctx", {})
    match error["type"]:
        case "missing":
            field = section.model_fields.get(keys[-1])
            return name, "missing", f"add it{f': {field.description}' if field and field.description else ''}"
        case "extra_forbidden":
            fix = fix_of_removed(name) or (None if choice is None else _other_choice(*choice, keys))
            if issubclass(section, TaskSource):
                # its fields are its own: other programs' names for ours do not occur in it
                fix = did_you_mean(name, list(fields_of(section)))
            fix = fix or familiar(name, error["input"]) or did_you_mean(name, list(fields_of(section)), model)
            return name, f"unknown key {keys[-1]!r}", fix
        case "value_error":
            told = context["error"]
            if isinstance(told, SettingError):
                return ".".join(filter(None, (name, told.field))), told.problem, told.fix
            return name, str(told), ""
        case "literal_error" | "enum":
            expected = context["expected"].replace("False", "false").replace("True", "true")
            return name, f"got {got}", f"use {expected}"
        case "model_type" | "dict_type" | "model_attributes_type":
            return name, f"got {got}, not a section", f"write `{keys[-1]}:` and its keys below, indented"
        case "list_type":
            return name, f"got {got}, not a list", "write [..., ...]"
        case "string_type":
            return name, f"got {got}, not text", "write text, in quotes if it looks like another type"
    if (meant := _without_quotes(error["input"])) is not None:
        return name, f"got {got}, which is text", f"write it without quotes: {meant}"
    # pydantic adds how it tried to read the value
    return name, f"got {got}", re.sub("^(Input|String) should", "it must", wanted).partition(", unable to parse")[0]


def _other_choice(section: type[Choice], choice: str, keys: list[str]) -> str | None:
    """Return the fix for an option, at `keys`, that other choices have; None if none has it."""
    *path, _, name = keys
    others = [other for other, kind in section.kinds.items() if name in kind.model_fields]
    chooser = ".".join([*path, section.chooser])
    now = f"the {path[-1]} is a {choice}" if choice in section.model_fields else f"{chooser} is {choice}"
    return f"remove it: {' or '.join(others)} has it, and {now}" if others else None


def _without_quotes(given: Any) -> str | None:
    """Return the number or truth value in a text that was written in quotes, else None."""
    with suppress(ValueError):
        if isinstance(given, str) and isinstance(parse_yaml(given), (bool, int, float)):
            return given.strip()
    return None


def did_you_mean(name: str, known: list[str], model: type[BaseModel] | None = None) -> str:
    """Return the fix for an unknown field: the known one that is meant, in this section or elsewhere in `model`."""
    parent, _, last = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    close = difflib.get_close_matches(last, known, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = [path for path in (all_fields(model) if model else ()) if path.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"remove it; {parent or 'a recipe'} knows {', '.join(known) or 'no fields here'}"


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _section(argument))), None)


def all_fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the types of all fields by dotted name, without those in entries of mappings and lists."""
    found: dict[str, Any] = {}
    for key, field in fields_of(model).items():
        found[prefix + key] = field.annotation
        for kind in model.kinds.values() if key == "options" and issubclass(model, Choice) else ():
            found |= all_fields(kind, f"{prefix}options.")
        if (inner := _section(field.annotation)) and not str(field.annotation).startswith(("dict", "list")):
            found |= all_fields(inner, f"{prefix}{key}.")
    return found


@cache
def familiar_names() -> dict[str, dict[str, str]]:
    """Return the names of settings in other training programs, and the recipe's fields with the same function."""
    text = Path(__file__).with_name("familiar_names.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = yaml.safe_load(text)
    return found


def familiar(name: str, value: object) -> str | None:
    """Return the fix for an unknown field that another program has, or that is a section of its settings; else None."""
    told = [
        f"{ours.replace(', ', ' and ')} for {program}'s {theirs}"
        for ours, program, theirs in dict.fromkeys(filter(None, _found(name, value)))
    ]
    return f"write {'; '.join(told)}" if told else None


def _found(name: str, value: object) -> Iterator[tuple[str, str, str] | None]:
    """Yield our fields, the program, and its name for a setting, or for each one in a section."""
    items = value.items() if isinstance(value, dict) else ()
    inside = [found for key, item in items for found in _found(f"{name}.{key}", item)]
    yield from filter(None, inside) if any(inside) else [_match(name)]


def _match(name: str) -> tuple[str, str, str] | None:
    """Return our fields, the program, and its name: the one with which `name` has most of its last parts in common."""
    best, longest = None, 0
    for program, known in familiar_names().items():
        for theirs, ours in known.items():
            # the last parts that both have
            ends = zip(reversed(name.split(".")), reversed(theirs.split(".")), strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
            enough = length > 1 or "." not in theirs or _DISTINCT.fullmatch(theirs.rpartition(".")[2])
            if length > longest and enough:
                best, longest = (ours, program, theirs), length
    return best
