"""The fields of a source of tasks, or of a recipe, in words: their types, defaults and meanings."""

import inspect
import types
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the sections in a type, each with the key suffix that leads to it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    origin = get_origin(annotation)
    key = "<name>" if origin is dict else "<n>" if origin is list else ""
    for part in get_args(annotation):
        for model, below in models_in(part):
            yield model, ".".join(filter(None, (key, below)))


def type_words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Describe a type for readers of YAML, such as `integer > 0 or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        first, *bounds = parts
        return type_words(first, [limit for each in bounds for limit in getattr(each, "metadata", [each])])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_words(part, metadata) for part in parts)
    if origin is Literal:
        return _one_of([str(part).lower() if isinstance(part, bool) else str(part) for part in parts])
    if origin is list:
        return f"list of {type_words(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_words(part) for part in parts) + "]"
    if origin is dict:
        return f"mapping of {type_words(parts[0])} to {type_words(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _one_of([member.value for member in annotation])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    limits = [(sign, getattr(limit, key, None)) for limit in (metadata or []) for key, sign in _BOUNDS.items()]
    found = [f"{sign} {value:g}" for sign, value in limits if value is not None]
    return " ".join([_WORDS[annotation], *([", ".join(found)] if found else [])])


def _one_of(values: list[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def default_words(field: FieldInfo) -> str:
    """Return a field's default as YAML, or that it is required; "" if fields below it, or loading, give the default."""
    if field.is_required():
        return "" if "default:" in (field.description or "") else "**required**"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`" if value != "" else "empty"


def docstring_of(documented: type) -> str:
    """Return a docstring as one line."""
    return " ".join(inspect.cleandoc(documented.__doc__ or "").split())


def meaning(field: FieldInfo) -> str:
    """Return a field's docstring, or else that of its section."""
    below = next((model for model, _ in models_in(field.annotation)), None)
    return field.description or (docstring_of(below) if below is not None else "")
