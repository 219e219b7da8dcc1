"""The check of a call's arguments against its tool's JSON Schema. Parts that Python's libraries cannot use, or that are
wrong, are removed from a copy of the schema and named in `ArgumentCheck.unchecked`."""

import copy
import json
import re
import warnings
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012, specification_with

from agentfactory.base.errors import short

_PATTERN_SECONDS = 0.5
"""Time limit for matching one pattern, which can backtrack for an exponentially long time."""


class UncheckedError(Exception):
    """Arguments could not be checked; the message gives the reason."""


class ArgumentCheck:
    """The check of arguments against `schema`. `unchecked` names the parts of the schema that cannot be used."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.unchecked: list[str] = []
        self._validator: Validator | None = None
        try:
            usable = _UsableSchema(schema)
            self._validator = _checking(usable.kind)(usable.schema, registry=Registry())
            self.unchecked = usable.unchecked
        except Exception as error:  # boundary: schemas of any shape, and the libraries that read them
            self.unchecked = [f"the whole schema ({_reason(error)})"]

    def fault(self, arguments: dict[str, Any]) -> str | None:
        """Return the fault of `arguments`, or None. Raises UncheckedError if the schema turns out unusable."""
        if self._validator is None:
            return None
        try:
            mismatch = best_match(self._validator.iter_errors(arguments))
        except Exception as error:  # boundary: schemas of any shape, and the libraries that read them
            raise UncheckedError(_reason(error)) from error
        if mismatch is None:
            return None
        return f"{mismatch.json_path.removeprefix('$').removeprefix('.') or 'the arguments'}: {mismatch.message}"


class _UsableSchema:
    """A copy of a schema, for validators of `kind`, without the parts that cannot be used, which `unchecked` names."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = copy.deepcopy(schema)
        self.unchecked: list[str] = []
        dialect = self.schema.get("$schema")
        dialect = dialect if isinstance(dialect, str) else ""
        self.kind = validators.validator_for({"$schema": dialect}, default=Draft202012Validator)
        self._paths: dict[int, str] = {}  # id of a visited schema -> its path
        self._parents: dict[int, list[tuple[dict[str, Any], str]]] = {}
        """id of a visited schema -> the schemas and keywords that contain it or refer to it."""
        self._in_place: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        """id of a visited schema -> the keywords and schemas in it that judge the same value."""
        self._references: list[dict[str, Any]] = []  # the schemas that have a `$ref`
        self._holes: list[dict[str, Any]] = []  # the schemas that lost a part
        self._visit(self.schema, "")
        specification = specification_with(dialect, default=DRAFT202012)
        self._resolver = Registry().resolver_with_root(specification.create_resource(self.schema))
        for referring in self._references:  # grows while it is read
            self._follow(referring)
        for referring in self._references:
            if "$ref" in referring and self._is_endless(referring):
                self._remove(referring, "$ref")
        for hole in self._holes:  # grows while it is read
            # it lost a part: remove the keywords that would refuse a value because it now accepts more
            for key in ("unevaluatedItems", "unevaluatedProperties"):  # the lost part may have evaluated some
                hole.pop(key, None)
            for schema, key in self._parents.pop(id(hole), []):
                for dependent in _DEPENDENTS.get(key, ()):
                    schema.pop(dependent, None)
                self._holes.append(schema)

    def _visit(self, schema: Any, path: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._paths:
            return
        self._paths[id(schema)] = path
        schema.pop("$schema", None)  # one draft for all: validators would change with it
        for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
            if key in schema and not isinstance(schema[key], str):
                del schema[key]
        for key, value in list(schema.items()):
            if key not in self.kind.VALIDATORS and key not in _WITHOUT_VALIDATOR:
                continue
            if not self._is_usable(key, value):
                self._remove(schema, key)
            elif key == "type" and schema is self.schema and value != "object" and "object" not in value:
                self._remove(schema, key)  # arguments are always an object
            elif key in _MAPS:
                self._visit_map(schema, key, value)
            elif key in _LISTS or key in _SINGLE:
                several = isinstance(value, list)
                for place, child in enumerate(value if several else [value]):
                    self._enter(schema, key, child, f"{key}.{place}" if several else key)
            elif key == "$ref":
                self._references.append(schema)

    def _is_usable(self, key: str, value: Any) -> bool:
        """Return whether the dialect's meta-schema accepts a keyword's value, whose subschemas are visited later."""
        if key in _MAPS or key == "pattern":
            return isinstance(value, dict) if key in _MAPS else _is_pattern(value)
        if key in _LISTS or key in _SINGLE:
            value = [_hollow(child) for child in value] if isinstance(value, list) else _hollow(value)
        if value == [] or key == "format":  # formats are not checked
            return key in ("const", "format", "required")
        return _is_accepted(self.kind, key, json.dumps(value))

    def _visit_map(self, schema: dict[str, Any], key: str, children: dict[str, Any]) -> None:
        for name, child in list(children.items()):
            are_names = isinstance(child, list) and all(isinstance(one, str) for one in child)
            if key == "patternProperties" and not _is_pattern(name):
                del children[name]
                schema.pop("additionalProperties", None)  # it would refuse what only this pattern allows
                self._note(schema, f"{key}.{name}", child)
            elif isinstance(child, dict):
                self._enter(schema, key, child, f"{key}.{name}")
            elif not isinstance(child, bool) and not (key == "dependencies" and are_names):
                children[name] = True
                self._note(schema, f"{key}.{name}", child)

    def _enter(self, schema: dict[str, Any], key: str, child: Any, step: str) -> None:
        if isinstance(child, dict):
            self._connect(schema, key, child)
            self._visit(child, self._path(schema, step))

    def _connect(self, schema: dict[str, Any], key: str, child: dict[str, Any]) -> None:
        self._parents.setdefault(id(child), []).append((schema, key))
        if key in _IN_PLACE:
            self._in_place.setdefault(id(schema), []).append((key, child))

    def _follow(self, schema: dict[str, Any]) -> None:
        """Find the target of a schema's `$ref`, which may lie outside the schemas that were visited."""
        reference = schema["$ref"]
        try:
            target = self._resolver.lookup(reference).contents
        except Exception:  # boundary: `referencing` on references of any shape
            target = None
        if isinstance(target, dict):
            self._connect(schema, "$ref", target)
            self._visit(target, reference.removeprefix("#/").replace("/", "."))
        elif not isinstance(target, bool):
            self._remove(schema, "$ref")

    def _is_endless(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema leads back to itself without a step into the value."""
        waiting, seen = [schema], set[int]()
        while waiting:
            one = waiting.pop()
            for key, child in self._in_place.get(id(one), []):
                if key in one and child is schema:
                    return True
                if key in one and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
        return False

    def _remove(self, schema: dict[str, Any], key: str) -> None:
        value = schema.pop(key)
        if key in ("properties", "patternProperties"):
            schema.pop("additionalProperties", None)
        self._note(schema, key, value)

    def _note(self, schema: dict[str, Any], step: str, value: Any) -> None:
        self._holes.append(schema)
        self.unchecked.append(f"{self._path(schema, step)} ({short(value)})")

    def _path(self, schema: dict[str, Any], step: str) -> str:
        path = self._paths[id(schema)]
        return f"{path}.{step}" if path else step


def _hollow(schema: Any) -> Any:
    return {} if isinstance(schema, dict) else schema


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and _compiled(value) is not None


_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_WITHOUT_VALIDATOR = ("$defs", "definitions", "else", "maxContains", "minContains", "then")
"""Keywords that are read by the validators of others, or hold only definitions."""
_IN_PLACE = ("$ref", "allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then")
"""Keywords whose subschemas judge the same value as their schema."""
_DEPENDENTS = {"contains": ("maxContains",), "if": ("if", "then", "else"), "not": ("not",), "oneOf": ("oneOf",)}
"""Keyword -> the keywords that refuse a value because a subschema of the keyword accepts it."""


@lru_cache(maxsize=4096)
def _is_accepted(kind: type[Validator], key: str, value: str) -> bool:
    """Return whether the meta-schema of `kind` accepts the JSON text `value`; repetitions do no harm."""
    errors = kind(kind.META_SCHEMA).iter_errors({key: json.loads(value)})
    return not any(error.path and error.validator != "uniqueItems" for error in errors)


@cache
def _checking(kind: type[Validator]) -> type[Validator]:
    """Return `kind` with exact decimal arithmetic, and with patterns that take a bounded time."""
    checking: type[Validator] = validators.extend(kind, {"multipleOf": _multiple_of, "pattern": _pattern})
    return checking


def _multiple_of(validator: Any, unit: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    # the shortest decimal of a float is the number that was written: 0.07 is a multiple of 0.01
    if validator.is_type(value, "number") and (Fraction(repr(value)) / Fraction(repr(unit))).denominator != 1:
        yield ValidationError(f"{value!r} is not a multiple of {unit!r}")


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string"):
        compiled = _compiled(pattern)
        if compiled is not None and not compiled.search(value, timeout=_PATTERN_SECONDS):
            yield ValidationError(f"{value!r} does not match {pattern!r}")


_ELSEWHERE = re.compile(r"\\[^dDwWsSbBnrtfvxu0-9\W_]|\[\^?\]|\[\[:|\{(?![0-9]+(,[0-9]*)?\})")
"""Parts of a pattern that have another meaning in Python than in ECMAScript, or none."""


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> "regex.Pattern[str] | None":
    """Return a pattern of ECMAScript that means the same in Python; None if it has no such meaning."""
    if _ELSEWHERE.search(re.sub(r"\\\\", "", pattern)):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
            return regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError, FutureWarning):
        return None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
