"""Argument values: strict JSON, and text converted to the types of a tool's schema."""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from agentfactory.base.messages import referred

KINDS: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
KINDS |= dict.fromkeys((int, float), "a number")
"""JSON type -> its name in messages to the model."""
MAX_DEPTH = 100
MAX_LITERAL = 100_000
"""Maximum characters of a value in Python's notation, whose parser takes 500 bytes of memory per character."""
_SPACE = re.compile(r"\s*")


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Return the JSON value at `position`, and its end. Raises ValueError, with a message for the model, if it is
    invalid, has a duplicate key, or cannot be written again (numbers too large, surrogate halves)."""
    try:
        # the JSON value determines its own end, so a closing tag inside a string argument is only text
        value, end = _DECODER.raw_decode(text, position)
        check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos - position}"
        elif isinstance(error, UnicodeEncodeError):
            reason = "half of a surrogate pair"
        elif isinstance(error, RecursionError):
            reason = "nested too deeply"
        raise ValueError(f"not valid JSON ({reason})") from error
    return value, end


def whole_object(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON object that `text` is, or None and what is wrong, for the model."""
    if not text.startswith("{"):
        return None, "expected a JSON object"
    try:
        value, end = read_json(text)
    except ValueError as error:
        return None, str(error)
    return (value, "") if end == len(text) else (None, f"text follows the JSON object at character {end}")


def read_number(text: str, problem: str) -> int | float:
    """Return a finite number. Raises ValueError with the beginning of `text` and `problem` for any other text."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise ValueError(f"{text[:20]}{problem}")


def check_depth(value: Any) -> None:
    """Raise RecursionError if a value is nested so deeply that later code could fail."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [v for x in layer if isinstance(x, list | dict) for v in (x.values() if isinstance(x, dict) else x)]
        if not layer:
            return
    raise RecursionError


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    found = _SPACE.match(text, position)
    return found.end() if found else position


def convert(text: str, schema: Any, root: dict[str, Any]) -> Any:
    """Convert a value written as text by its parameter's schema; `root` is the schema with the definitions. Types are
    tried in order, but null first; without any, JSON is. Text that fits none stays text: the tool reports it."""
    types = list(dict.fromkeys(_types(schema, root, 0)))
    plain = text.strip()
    if ("null" in types or not types) and plain in ("null", "None"):
        return None
    if types[:1] == ["string"]:
        return text
    if plain in ("True", "False") and ("boolean" in types or not types):
        return plain == "True"
    try:
        value, end = read_json(plain)
    except ValueError:
        # some templates write lists and objects as Python does
        if types and not {"array", "object"}.isdisjoint(types):
            value = _read_literal(plain, text)
            return value if any(_is(value, kind) for kind in types) else text
        return text
    if end != len(plain):
        return text
    for kind in types:
        if kind == "string":
            return text
        if _is(value, kind):
            return value
    return text if types else value


def _read_literal(plain: str, text: str) -> Any:
    """Return the list or object that `plain` is in Python's notation, if JSON can hold it; otherwise `text`."""
    if len(plain) > MAX_LITERAL:
        return text
    try:
        with warnings.catch_warnings():
            # Python warns of unknown escapes, such as of a regular expression
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(plain, mode="eval")
        if not isinstance(tree.body, ast.List | ast.Dict):
            return text
        value = ast.literal_eval(tree)
        check_depth(value)
        for keys in [node.keys for node in ast.walk(tree) if isinstance(node, ast.Dict)]:
            if len({key.value for key in keys if isinstance(key, ast.Constant)}) < len(keys):
                return text
        # sets, bytes, surrogate halves and infinities have no JSON; tuples would become lists
        return value if json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) == value else text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def write_value(value: Any) -> str:
    """Write a value as text that `convert` parses: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 8:
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (kind for kind in named if isinstance(kind, str))
    elif "enum" in schema or "const" in schema:
        choices = schema.get("enum")
        for value in choices if isinstance(choices, list) else [schema.get("const")]:
            yield next((kind for kind in _PYTHON if _is(value, kind)), "string")
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            yield from _types(option, root, depth + 1)
    yield from _types(referred(schema.get("$ref"), root), root, depth + 1)


_PYTHON: dict[str, Any] = {"null": type(None), "boolean": bool, "integer": int, "number": (int, float)}
_PYTHON |= {"string": str, "array": list, "object": dict}


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _PYTHON.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def finite(number: str) -> float:
    """Convert the JSON text of a number, for `parse_float`. Raises ValueError if it is too large."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:20]} is too large")
    return value


def no_constant(name: str) -> float:
    """Raise ValueError for NaN and the infinities. For `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for a duplicate key, whose first value would be lost silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=no_constant, object_pairs_hook=_once)
