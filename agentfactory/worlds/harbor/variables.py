"""`${NAME}` in task.toml: variables of this machine that the recipe names in `env`.

Rows have the texts as they were written. Only the environment of a starting process has the values.
"""

import os
import re
from collections.abc import Mapping

from agentfactory.base.processes.environment import is_named, named

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_SHORTEST_SECRET = 8
"""Shorter values are no keys, and may occur in any text."""


def names_without_default(text: str) -> list[str]:
    """Return the variables in a text that must have a value."""
    return [match[1] for match in _VARIABLE.finditer(text) if match[2] is None]


def expanded(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts by name with `${NAME}` and `${NAME:-default}` replaced; the default replaces a variable that the
    recipe does not name, or that is not set. Raises ValueError if it has no default."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2]) if is_named(match[1]) else match[2]
        if found is None:
            raise ValueError(f"task.toml: {match[1]} is not set, or not named in the recipe; fix: env: [{match[1]}]")
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in texts.items()}


def masked(text: str) -> str:
    """Return a text with `***` in place of the values of variables that the recipe names."""
    values = {os.environ.get(name, "") for name in named()}
    for value in sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(value, "***")
    return text
