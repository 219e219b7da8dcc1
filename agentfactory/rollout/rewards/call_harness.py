"""Calls a solution's functions inside the sandbox; its source is sent there whole, so it imports the standard library
alone.

What it prints are the solution's own claims, for the solution shares its process. They gain nothing by being forged:
the expected outputs are not in the sandbox, and the verdict is given outside.
"""

import inspect
import json
import os
import sys
import types
from typing import Any


def comparable(value: Any) -> Any:
    """`value` as JSON has it: tuples are lists, sets are sorted, keys are text. Raises TypeError for other objects."""
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
    """Print a line for each call, (name, arguments, named arguments): its number and what it returned, as JSON."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the solution prints is no reply
    solution = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "solution.py", "exec"), vars(solution))
    for number, (name, arguments, named) in enumerate(calls):
        try:
            function: Any = solution
            for part in name.split("."):
                function = getattr(function() if inspect.isclass(function) else function, part)
            reply = json.dumps([number, comparable(function(*arguments, **named))])
        except BaseException as error:  # also SystemExit: the other calls are still to be made
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(reply, file=replies, flush=True)
