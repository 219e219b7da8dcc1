"""Gymnasium's spaces in words: what an action may be, reading one, and describing an observation."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

MOST_NUMBERS = 64


class UnsupportedSpace(ValueError):
    """A space that cannot be put into words."""


def action_reader(space: spaces.Space[Any], names: Sequence[str]) -> tuple[str, Callable[[Any], Any]]:
    """Return a description of the actions, and a function that converts a model's action; it raises ValueError with
    what is allowed. `names`: of a Discrete space's actions, or of another one's numbers. Raises UnsupportedSpace."""
    match space:
        case spaces.Discrete():
            return _discrete(space, names)
        case spaces.Text():
            allowed = f"a text of {space.min_length} to {space.max_length} of the characters {space.characters}"
            return f"An action is {allowed}.", _checked(lambda given: str(given), space, allowed)
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() if _is_short(space):
            return _array(space, names)
    raise UnsupportedSpace(f"the action space {space} is not supported")


def _is_short(space: spaces.Space[Any]) -> bool:
    return space.shape is not None and len(space.shape) <= 1 and math.prod(space.shape) <= MOST_NUMBERS


def _discrete(space: spaces.Discrete, names: Sequence[str]) -> tuple[str, Callable[[Any], Any]]:
    first, count = int(space.start), int(space.n)
    by_name = {name.lower(): first + place for place, name in enumerate(names)}
    if names:
        listed = ", ".join(f"{first + place} ({name})" for place, name in enumerate(names))
    else:
        listed = f"the whole numbers from {first} to {first + count - 1}"

    def read(given: Any) -> Any:
        text = str(given).strip()
        number = by_name.get(text.lower())
        if number is None and re.fullmatch(r"[+-]?\d+(\.0+)?", text):
            number = int(float(text))
        if number is None or not first <= number < first + count:
            raise ValueError(f"action: got {given!r:.80}; the actions are {listed}")
        return space.dtype.type(number)

    return f"The actions are {listed}.", read


def _array(space: Any, names: Sequence[str]) -> tuple[str, Callable[[Any], Any]]:
    count, dtype = math.prod(space.shape), np.dtype(space.dtype)
    match space:
        case spaces.MultiDiscrete():
            low, high = np.asarray(space.start).ravel(), np.asarray(space.start + space.nvec - 1).ravel()
        case spaces.MultiBinary():
            low, high = np.zeros(count, int), np.ones(count, int)
        case _:
            low, high = space.low.ravel(), space.high.ravel()
    whole = dtype.kind in "iu"
    bounds = [_bounds(*each) for each in zip(low, high, strict=True)]
    named = [f"{bound} ({name})" for name, bound in zip(names, bounds, strict=True)] if names else bounds
    kind = "whole number" if whole else "number"
    if len(set(named)) == 1:
        allowed = f"{count} {kind}s, each {named[0]}" if count > 1 else f"a {kind} {named[0]}"
    else:
        allowed = f"{count} {kind}s: {', '.join(named)}"

    def convert(given: Any) -> Any:
        value = json.loads(given) if isinstance(given, str) else given
        numbers = np.asarray(value if isinstance(value, list) else [value], dtype=np.float64).ravel()
        if numbers.shape != (count,) or not np.isfinite(numbers).all():
            raise ValueError
        if (whole and (numbers != np.round(numbers)).any()) or (numbers < low).any() or (numbers > high).any():
            raise ValueError
        return numbers.astype(dtype).reshape(space.shape)

    return f"An action is {allowed}.", _checked(convert, space, allowed)


def _bounds(low: Any, high: Any) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f"from {_number(low)} to {_number(high)}"
    return f"of at least {_number(low)}" if math.isfinite(low) else "of any size"


def _checked(convert: Callable[[Any], Any], space: spaces.Space[Any], allowed: str) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        try:
            value = convert(given)
        except (ValueError, TypeError):
            value = None
        if value is None or not space.contains(value):
            raise ValueError(f"action: got {given!r:.80}; it has to be {allowed}")
        return value

    return read


def check_describable(space: spaces.Space[Any]) -> None:
    """Raise UnsupportedSpace if observations of the space are too large for words, or of an unknown kind."""
    match space:
        case spaces.Discrete() | spaces.Text():
            return
        case spaces.Tuple():
            parts = list(space.spaces)
        case spaces.Dict():
            parts = list(space.spaces.values())
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            if math.prod(space.shape) <= MOST_NUMBERS:
                return
            raise UnsupportedSpace(
                f"an observation of {space.shape} has {math.prod(space.shape)} numbers, and at most {MOST_NUMBERS} are "
                "shown as text"
            )
        case _:
            raise UnsupportedSpace(f"the observation space {space} is not supported")
    for part in parts:
        check_describable(part)


def described(observation: Any, names: Sequence[str] = ()) -> str:
    """Return an observation in words. `names` are those of its numbers, if there are as many."""
    match observation:
        case dict():
            return "\n".join(f"{key}: {described(value)}" for key, value in observation.items())
        case tuple() | list():
            return _listed([described(value) for value in observation], names)
        case np.ndarray() if observation.ndim:
            if observation.ndim == 1:
                return _listed([_number(value) for value in observation], names)
            return "\n".join(described(row) for row in observation)
        case str():
            return observation
    return _number(observation)


def _listed(values: Sequence[str], names: Sequence[str]) -> str:
    if names and len(names) == len(values):
        return ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
    return f"[{', '.join(values)}]"


def _number(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else f"{number:.4g}"
