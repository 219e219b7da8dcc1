"""Counts the settings of a recipe: `python benchmarks/settings.py`.

A setting is a field that is no section. A section that stands at two places, as `data` and `eval.data` do, counts once.
Apart from them, the fields of typed `options`, of which a recipe has those of what it chooses; a field that several
choices share counts once. The last line is JSON.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from agentfactory.recipe.composition import RECIPES
from agentfactory.recipe.schema import Recipe
from agentfactory.tools.config import Choice


def sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield a section and those below it, with their paths."""
    yield section, path
    for name, field in section.model_fields.items():
        for below in _sections_in(field.annotation):
            yield from sections(below, f"{path}{name}.")


def settings(section: type[BaseModel]) -> dict[tuple[type[BaseModel], str], str]:
    """Return the settings: (section that declares it, name) -> path."""
    found: dict[tuple[type[BaseModel], str], str] = {}
    for each, path in sections(section):
        for name, field in each.model_fields.items():
            if not [*_sections_in(field.annotation)]:
                found.setdefault((_declaring(each, name), name), f"{path}{name}")
    return found


def options(section: type[BaseModel]) -> dict[tuple[type[BaseModel], str], str]:
    """Return the fields of typed options, as `settings` does."""
    found: dict[tuple[type[BaseModel], str], str] = {}
    for each, path in sections(section):
        if issubclass(each, Choice):
            for kind in each.kinds.values():
                for name in kind.model_fields:
                    found.setdefault((_declaring(kind, name), name), f"{path}options.{name}")
    return found


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _declaring(section: type[BaseModel], name: str) -> type[BaseModel]:
    return next(each for each in reversed(section.__mro__) if name in getattr(each, "__annotations__", {}))


def _used() -> set[str]:
    """Return the fields that a recipe that comes with AgentFactory sets, without the names of servers and numbers."""

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
