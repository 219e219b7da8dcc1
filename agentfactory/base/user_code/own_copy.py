"""Copies of data for users' functions, which may change what they get."""

from typing import Any


def own_copy(value: Any) -> Any:
    """Copy the mappings and lists of a JSON-like value; everything else in it is shared."""
    if type(value) is dict:
        return {key: own_copy(part) for key, part in value.items()}
    if type(value) is list:
        return [own_copy(part) for part in value]
    return value
