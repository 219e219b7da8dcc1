"""Mutants of JSON values and of texts, for fuzzers."""

import copy
import random
from collections.abc import Sequence
from typing import Any

JUNK: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        0.5,
        1e400,
        10**40,
        "",
        "a",
        "\ud800",
        "string",
        "#",
        "#/$defs/a",
        "(",
        r"\p{L}",
        [],
        {},
    ),
    *([None], [[]], {"": None}, {"$ref": "#"}, {"type": "array"}, {"anyOf": [True, {"$ref": "#"}]}, float("nan")),
    *("object", "text", {"text": None}, {"type": "text", "text": "b"}, "data:image/png;base64,AA", ["a", "a"]),
]


class Mutants:
    """A source of mutants. `words` are the names that keys may get, `junk` the values that may replace others, and
    `pieces` the texts that may be torn into others."""

    def __init__(self, seed: int, words: Sequence[str], junk: Sequence[Any], pieces: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self._words, self._junk, self._pieces = words, junk, pieces

    def of(self, value: Any) -> Any:
        """Return a copy of a JSON value with one to five changes."""
        value = copy.deepcopy(value)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 5))):
            value = self._changed(value)
        return value

    def torn(self, text: str) -> str:
        """Return a text with a piece in it, or in place of some characters."""
        place = self.random.randrange(len(text) + 1)
        return text[:place] + self.random.choice(self._pieces) + text[place + self.random.choice((0, 1, 5)) :]

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, (dict, list)) or not value or self.random.random() < 0.15:
            return copy.deepcopy(self.random.choice(self._junk))
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = self.random.choice(keys)
        chance = self.random.random()
        if chance < 0.1:
            del value[key]
        elif chance < 0.2 and isinstance(value, dict):
            value[self.random.choice(self._words)] = value.pop(key)
        elif chance < 0.3 and isinstance(value, dict):
            value[self.random.choice(self._words)] = copy.deepcopy(self.random.choice(self._junk))
        elif chance < 0.4:
            value[key] = copy.deepcopy(value)
        else:
            value[key] = self._changed(value[key])
        return value


def keys_of(value: Any) -> list[str]:
    """Return all keys of the objects in a JSON value."""
    if isinstance(value, dict):
        return [*value, *(key for one in value.values() for key in keys_of(one))]
    return [key for one in value for key in keys_of(one)] if isinstance(value, list) else []
