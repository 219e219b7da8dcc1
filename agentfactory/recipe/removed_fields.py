"""Fields that recipes had before: saved recipes with the old default load, and errors say what to do instead."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from agentfactory.recipe.choices import places, value_at


@cache
def _removed() -> dict[str, tuple[Any, str]]:
    """Return the removed fields, with * for any name or place -> the default with which runs saved it, and the fix."""
    found: dict[str, tuple[Any, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return found


def fix_of_removed(name: str) -> str | None:
    """Return what to do about the field `name` if recipes had it before, else None."""
    own = re.sub(r"^(eval\.)?data\.sources\.\w+\.", "", name)
    for known, (_, fix) in _removed().items():
        pattern = re.escape(known).replace(r"\*", r"[^.]+")
        # a source of tasks has settings of `rollout` itself
        if re.fullmatch(pattern, own) or (own != name and re.fullmatch(pattern, f"rollout.{own}")):
            return fix
    return None


def drop_removed(recipe: Any) -> None:
    """Remove fields from a recipe's mapping that recipes had before, if they have the default of then."""
    for context in _contexts(recipe):
        if isinstance(context.get("options"), dict):
            # its options became its fields
            context |= context.pop("options") | context
    for place in (recipe, *_sources(recipe)):
        for known, (value, _) in _removed().items():
            # a source of tasks has settings of `rollout` itself
            for section, name in places(place, known.removeprefix("" if place is recipe else "rollout.").split(".")):
                given = section[name]
                if given == value and isinstance(given, bool) == isinstance(value, bool):
                    del section[name]


def complete_saved(recipe: Any) -> None:
    """Drop removed fields of a saved recipe, and set those that it lacks to what its run was trained with."""
    drop_removed(recipe)
    for context in _contexts(recipe):
        context.setdefault("keep_turns", 2)


def _contexts(recipe: Any) -> Iterator[dict[str, Any]]:
    found = [value_at(recipe, "rollout.context"), *(value_at(source, "context") for source in _sources(recipe))]
    yield from (context for context in found if isinstance(context, dict))


def _sources(recipe: Any) -> list[Any]:
    found = [value_at(recipe, f"{section}.sources") for section in ("data", "eval.data")]
    return [entry for entries in found if isinstance(entries, list) for entry in entries]
