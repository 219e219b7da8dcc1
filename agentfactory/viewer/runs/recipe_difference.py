"""The differences between two resolved recipes, key by key."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import yaml

from agentfactory.launching.run_folder import RunFolder
from agentfactory.recipe.composition import replace_prefixes, resolve_saved
from agentfactory.recipe.yaml_text import parse_saved

_MISSING = object()


def difference(one: str, other: str, folders: Sequence[RunFolder] = ()) -> dict[str, Any]:
    """Compare two recipes (YAML). `rows` has the `key` of every setting that differs, such as `train.learning_rate`,
    and its two `values` as text, None where a recipe lacks it; `same` is the number of settings that are equal. A
    section that only one recipe has is one setting, and so is a recipe that is not YAML. Paths in the two runs'
    `folders` begin with `${run}`, so that the same place in both is equal."""
    parsed = [_parsed(text) for text in (one, other)]
    if folders:
        parsed = [_placed(recipe, folder) for recipe, folder in zip(parsed, folders, strict=True)]
    pairs = [(key, _text(mine), _text(theirs)) for key, mine, theirs in _pairs("", *parsed)]
    rows = [{"key": key, "values": [mine, theirs]} for key, mine, theirs in pairs if mine != theirs]
    return {"rows": rows, "same": len(pairs) - len(rows)}


def settings_of(recipe: str, folder: RunFolder) -> dict[str, str | None]:
    """Return the settings of a run's recipe (YAML) by their keys, such as `train.learning_rate`, as text."""
    placed = _placed(_parsed(recipe), folder)
    return {key: _text(value) for key, value, _ in _pairs("", placed, placed)}


def _parsed(text: str) -> Any:
    try:
        return parse_saved(text)
    except ValueError:
        return text


def _placed(recipe: Any, folder: RunFolder) -> Any:
    """Return a recipe in which the run's own folder, and that of the run that it is a part of, is `${run}`."""
    if not isinstance(recipe, dict):
        return recipe
    resolved = resolve_saved(recipe, folder.path)
    return replace_prefixes(resolved, {str(folder.path): "${run}", str(folder.whole): "${run}"})


def _pairs(key: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        parts = [(name, mine.get(name, _MISSING), theirs.get(name, _MISSING)) for name in {**mine, **theirs}]
    elif _has_sections(mine) and _has_sections(theirs):
        parts = [(number, *pair) for number, pair in enumerate(zip_longest(mine, theirs, fillvalue=_MISSING))]
    else:
        yield key, mine, theirs
        return
    for name, *values in parts:
        yield from _pairs(f"{key}.{name}" if key else str(name), *values)


def _has_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _text(value: Any) -> str | None:
    """Return a value as a recipe would have it; a text that looks like another value is quoted."""
    if value is _MISSING:
        return None
    if value and (isinstance(value, dict) or _has_sections(value)):
        # null fields of a section that the other recipe lacks carry no information
        shown = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value
        return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).strip()
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return value
    return json.dumps(value, ensure_ascii=False, default=str)
