"""What differs between two resolved recipes, key by key."""

import json
from typing import Any

import yaml


def difference(one: str, other: str) -> dict[str, Any]:
    """Compare two recipes (YAML). `rows` has the `key` of every setting that differs, such as `train.learning_rate`,
    and its two `values` as text, None where a recipe lacks it; `same` is the number of the settings that are equal.

    A recipe that is not YAML is one setting without a key.
    """
    settings = [_settings(text) for text in (one, other)]
    keys = list(dict.fromkeys(key for found in settings for key in found))
    pairs = {key: [found.get(key) for found in settings] for key in _in_order(keys)}
    rows = [{"key": key, "values": values} for key, values in pairs.items() if values[0] != values[1]]
    return {"rows": rows, "same": len(pairs) - len(rows)}


def _in_order(keys: list[str]) -> list[str]:
    """Return the keys with those of one section together, in the order in which the sections appear."""
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return sorted(keys, key=lambda key: sections.index(key.partition(".")[0]))


def _settings(text: str) -> dict[str, str]:
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError:
        return {"": text}
    found: dict[str, str] = {}
    _flatten("", recipe, found)
    return found


def _flatten(key: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            _flatten(f"{key}.{name}" if key else str(name), part, found)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for number, part in enumerate(value):
            _flatten(f"{key}.{number}" if key else str(number), part, found)
    else:
        found[key] = _text(value)


def _text(value: Any) -> str:
    """Return a value as a recipe would have it; a text that looks like another value is quoted."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, ensure_ascii=False, default=str)
