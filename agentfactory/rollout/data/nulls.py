"""Padding nulls of columnar tables: a struct column has all fields of all rows, and null where a row lacks one. A null
is padding where no schema declares or allows it. A JSON Schema that is unusual or wrong raises no error here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfactory.base.messages import Message, ToolSpec, referred

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired")
_VALUES = ("default", "const", "example")
_LISTS_OF_VALUES = ("enum", "examples", "required", "type")
_COMBINED = {"anyOf": any, "oneOf": any, "allOf": all}
_ANYTHING: dict[str, Any] = {"additionalProperties": True}


@dataclass
class Nulls:
    """Counts of nulls: those `dropped`, those `kept` because no schema is known, and those `allowed` by a schema."""

    dropped: int = 0
    kept: int = 0
    allowed: int = 0


def drop_from_message(message: Mapping[str, Any], nulls: Nulls) -> dict[str, Any]:
    """Return an object of the OpenAI format, such as a message, without null fields, except `content`."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    nulls.dropped += len(message) - len(kept)
    return kept


def drop_from_schema(schema: Any, nulls: Nulls, columnar: bool) -> Any:
    """Return a JSON Schema without the nulls that none may have. `default` and `const` may be null: that is padding if
    the schema has other nulls, or is `columnar`, and does not declare the type null."""
    if not isinstance(schema, dict):
        return schema
    padded = columnar or any(value is None and key not in _VALUES for key, value in schema.items())
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None:
            if key in _VALUES and (not padded or _declares_null({**schema, key: 0}, schema)):
                kept[key] = value
            else:
                nulls.dropped += 1
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            named = {name: each for name, each in value.items() if each is not None}
            nulls.dropped += len(value) - len(named)
            kept[key] = {name: drop_from_schema(each, nulls, columnar) for name, each in named.items()}
        elif key in (*_VALUES, *_LISTS_OF_VALUES):
            kept[key] = value
        elif isinstance(value, list):
            kept[key] = [drop_from_schema(each, nulls, columnar) for each in value]
        else:
            kept[key] = drop_from_schema(value, nulls, columnar)
    return kept


def count_nulls(value: Any) -> int:
    """Return the number of null fields in a value, at any depth."""
    count, named = 0, isinstance(value, dict)
    for each in value.values() if named else value if isinstance(value, list) else ():
        if each is None:
            count += named
        elif isinstance(each, (dict, list)):
            count += count_nulls(each)
    return count


def nulls_in_calls(messages: Sequence[Message]) -> int:
    """Return the number of null fields in the arguments of the messages' calls."""
    return count_nulls([call["function"]["arguments"] for m in messages for call in m.get("tool_calls") or ()])


def drop_from_call(call: dict[str, Any], tools: Mapping[str, ToolSpec], nulls: Nulls) -> dict[str, Any]:
    """Return a call without the nulls, at any depth, that its tool's schema does not allow; unknown tools' are kept."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in tools:
        nulls.kept += count_nulls(arguments)
    elif count_nulls(arguments):
        # a tool without parameters takes none
        schema = {"properties": {}, **tools[name].parameters}
        arguments = _prune(arguments, [schema], schema, nulls)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def drop_from_history(task: dict[str, Any], specs: Sequence[ToolSpec], nulls: Nulls) -> dict[str, Any]:
    """Return a task without the nulls in calls that its chains' tools `specs` do not allow, unless it has tools."""
    messages = task.get("messages") or []
    if task.get("tools") or not nulls_in_calls(messages):
        return task
    by_name = {spec.name: spec for spec in specs}
    kept = []
    for message in messages:
        calls = [drop_from_call(call, by_name, nulls) for call in message.get("tool_calls") or ()]
        kept.append({**message, "tool_calls": calls} if calls else message)
    return {**task, "messages": kept}


def _prune(value: Any, schemas: Sequence[Any], root: dict[str, Any], nulls: Nulls) -> Any:
    if isinstance(value, list):
        return [_prune(each, [*_inside(schemas, root, place)], root, nulls) for place, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, each in value.items():
        declared = [*_inside(schemas, root, key)]
        if each is not None:
            kept[key] = _prune(each, declared, root, nulls)
        elif any(_takes_null(schema, root) for schema in declared):
            kept[key] = each
            nulls.allowed += 1
        else:
            nulls.dropped += 1
    return kept


def _inside(schemas: Sequence[Any], root: dict[str, Any], key: str | int) -> Iterator[Any]:
    """Yield the schemas of a property or of the item at a place; True if no schema declares the object's properties."""
    parts = [part for schema in schemas for part in _parts(schema, root)]
    if isinstance(key, int):
        for part in parts:
            first = part.get("prefixItems")
            if isinstance(first, list) and key < len(first):
                yield first[key]
            elif "items" in part:
                yield part["items"]
        return
    if not any({"properties", "patternProperties", "additionalProperties"} & part.keys() for part in parts):
        yield True
    for part in parts:
        named, patterns = part.get("properties"), part.get("patternProperties")
        found = [named[key]] if isinstance(named, dict) and key in named else []
        if isinstance(patterns, dict):
            found += [schema for pattern, schema in patterns.items() if _matches(pattern, key)]
        if not found and "additionalProperties" in part:
            found = [part["additionalProperties"]]
        yield from found


def _parts(schema: Any, root: dict[str, Any], seen: set[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a schema and all that it combines, refers to or alternates between, each once."""
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema
    inner = [each for key in _COMBINED if isinstance(schema.get(key), list) for each in schema[key]]
    inner += [schema[key] for key in ("then", "else") if key in schema]
    if "$ref" in schema:
        inner.append(referred(schema["$ref"], root, _ANYTHING))
    for each in inner:
        yield from _parts(each, root, seen)


def _takes_null(schema: Any, root: dict[str, Any], seen: set[int] | None = None) -> bool:
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen:
        return schema is not False
    seen.add(id(schema))
    kinds, values = schema.get("type"), schema.get("enum")
    if kinds not in (None, "null") and not (isinstance(kinds, list) and "null" in kinds):
        return False
    if (isinstance(values, list) and None not in values) or schema.get("const") is not None:
        return False
    combined = [(combine, schema[key]) for key, combine in _COMBINED.items() if isinstance(schema.get(key), list)]
    if "$ref" in schema:
        combined.insert(0, (all, [referred(schema["$ref"], root, _ANYTHING)]))
    return all(combine(_takes_null(each, root, seen) for each in inner) for combine, inner in combined)


def _declares_null(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return whether a schema takes null, and states what it takes."""
    states = {"type", "enum", "$ref", "anyOf", "oneOf", "allOf"} & {k for k, v in schema.items() if v is not None}
    return bool(states) and _takes_null({k: v for k, v in schema.items() if k not in _VALUES}, root)


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except re.error:  # a pattern of another dialect
        return True
