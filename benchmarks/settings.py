"""Count the settings of a recipe: `python benchmarks/settings.py`.

A setting is a field that is not a section. A section that occurs twice, such as `data` and `eval.data`, counts once.
The fields of typed `options`, which depend on a recipe's choices, are counted separately; a field that several choices
share counts once. The last line is JSON.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from agentfactory.base.config import Choice
from agentfactory.recipe.composition import RECIPES
from agentfactory.recipe.schema import Recipe
from agentfactory.worlds.commands.listing import models_in

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.reference_pages import sections

Settings = dict[tuple[type[BaseModel], str], str]
"""(section that declares it, name) -> path."""


def settings(recipe: type[BaseModel]) -> Settings:
    """Return the settings of a recipe."""
    found = sections(recipe)
    kinds = _kinds(found)
    return _fields({section: paths for section, paths in found.items() if section not in kinds})


def options(recipe: type[BaseModel]) -> Settings:
    """Return the fields of typed options."""
    found = sections(recipe)
    return _fields({section: found[section] for section in _kinds(found)})


def _fields(found: Mapping[type[BaseModel], Sequence[str]]) -> Settings:
    made: Settings = {}
    for section, paths in found.items():
        for name, field in section.model_fields.items():
            if not [*models_in(field.annotation)]:
                path = re.sub(r"<\w+>\.?", "", f"{paths[0]}.{field.alias or name}").removeprefix(".")
                made.setdefault((_declaring(section, name), name), path)
    return made


def _kinds(found: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    choices = [section for section in found if issubclass(section, Choice)]
    return [*dict.fromkeys(kind for section in choices for kind in section.kinds.values())]


def _declaring(section: type[BaseModel], name: str) -> type[BaseModel]:
    return next(each for each in reversed(section.__mro__) if name in getattr(each, "__annotations__", {}))


def _used() -> set[str]:
    """Return the fields that the bundled recipes set, without the names of servers and numbers."""

    def paths(data: Any, path: str) -> Iterator[str]:
        if isinstance(data, dict):
            for key, value in data.items():
                yield f"{path}{key}"
                yield from paths(value, f"{path}{key}.")
        for value in data if isinstance(data, list) else ():
            yield path.removesuffix(".")
            yield from paths(value, path)

    found = {path for file in RECIPES.rglob("*.yaml") for path in paths(yaml.safe_load(file.read_text()), "")}
    return {re.sub(r"^mcp_servers\.[^.]+\.", "mcp_servers.", path) for path in found}


def main() -> None:
    """Print every setting, and the counts."""
    top, below, used = settings(Recipe), options(Recipe), _used()
    unused = [path for path in [*top.values(), *below.values()] if path not in used]
    for path in [*top.values(), *below.values()]:
        print(f"{path}   (in no recipe here)" if path in unused else path)
    print(json.dumps({"settings": len(top), "options": len(below), "in no recipe": len(unused)}))


if __name__ == "__main__":
    main()
