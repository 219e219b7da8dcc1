"""Calls a solution's functions inside the sandbox, to which its source is sent. The solution shares its process, so
expected outputs are compared outside. Imports only the standard library."""

import inspect
import json
import os
import sys
import types
from typing import Any


def comparable(value: Any) -> Any:
    """Convert `value` to JSON types: tuples to lists, sets to sorted ones, keys to text. Raise TypeError for others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((comparable(item) for item in value), key=json.dumps)
    if isinstance(value, dict):
        return {str(key): comparable(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} cannot be compared")


def run(code: str, calls: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
    """Print a JSON line [number, result] for each call, which is (name, arguments, named arguments)."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the solution's own prints are not replies
    solution = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "solution.py", "exec"), vars(solution))
    for number, (name, arguments, named) in enumerate(calls):
        try:
            function: Any = solution
            for part in name.split("."):
                function = getattr(function() if inspect.isclass(function) else function, part)
            reply = json.dumps([number, comparable(function(*arguments, **named))])
        except BaseException as error:  # includes SystemExit: the remaining calls must still run
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(reply, file=replies, flush=True)
