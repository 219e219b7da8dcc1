"""Shell completion with argcomplete: the script that a shell reads, and the completion of recipe fields."""

import argparse
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the script for the shell, which gets the completions at the cursor from `agentfactory`."""
    import argcomplete

    return argcomplete.shellcode(["agentfactory"], shell=shell)


def answer(make_parser: Callable[[bool], argparse.ArgumentParser]) -> None:
    """Print the completions at the shell's cursor, and end the process. The argument of `make_parser` is True if the
    command is `view`."""
    import argcomplete

    # the viewer's packages take longer to import than everything else
    words = os.environ.get("COMP_LINE", "").split()
    parser = make_parser("view" in words[1:2])
    argcomplete.autocomplete(parser, default_completer=argcomplete.completers.FilesCompleter())


def complete_override(prefix: str, **_: Any) -> list[str]:
    """Return overrides that begin with `prefix`: names of fields, or after `=` the possible values of a field."""
    # imported here because the schema takes a moment to load, and argcomplete asks only at the cursor
    from agentfactory.recipe.schema import Recipe

    name, equals, _value = prefix.partition("=")
    fields = dict(_fields(Recipe, ""))
    if equals:
        return [f"{name}={value}" for value in _values(fields.get(name))]
    return [f"{field}=" for field in fields]


def _fields(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of the fields that an override can set, with their types."""
    from agentfactory.base.config import Choice, fields_of

    for name, field in fields_of(section).items():
        below = [part for part in (field.annotation, *get_args(field.annotation)) if hasattr(part, "model_fields")]
        if name == "options" and issubclass(section, Choice):
            for kind in dict.fromkeys(section.kinds.values()):
                yield from _fields(kind, f"{prefix}options.")
        # entries of a list, or under names that the user chooses, are not separate fields
        if below and get_origin(field.annotation) not in (list, dict):
            yield from _fields(below[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def _values(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [member.value for member in annotation]
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    return [value for part in get_args(annotation) for value in _values(part)]
