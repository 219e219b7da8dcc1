"""`typing.TypedDict` for pydantic, which before Python 3.12 accepts only that of typing_extensions."""

import sys
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typing_extensions


def readable(annotation: Any, twins: dict[Any, Any] | None = None) -> Any:
    """Replace each `typing.TypedDict` in `annotation` with a twin from typing_extensions.

    TypedDicts in the fields of a dataclass or a pydantic model are not reached. `twins` contains the twins created so
    far, for TypedDicts that contain themselves.

    Raises:
        NameError: a field of such a class is annotated by a string that cannot be resolved.
    """
    if sys.version_info >= (3, 12):
        return annotation
    twins = {} if twins is None else twins
    if typing_extensions.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        return twins[annotation] if annotation in twins else _twin(annotation, twins)
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is None or origin is Literal:
        return annotation
    changed = tuple(readable(member, twins) for member in members)
    if changed == members:
        return annotation
    if origin is Annotated:
        return Annotated[(changed[0], *annotation.__metadata__)]  # type: ignore[return-value]
    if origin in (Union, UnionType):
        return Union[changed]  # noqa: UP007
    return annotation.copy_with(changed) if hasattr(annotation, "copy_with") else origin[changed]


def _twin(original: Any, twins: dict[Any, Any]) -> Any:
    twin: Any = typing_extensions.TypedDict(original.__name__, {})  # type: ignore[misc, operator]
    twins[original] = twin
    twin.__doc__, twin.__module__, twin.__qualname__ = original.__doc__, original.__module__, original.__qualname__
    hints = get_type_hints(original, include_extras=True)
    twin.__annotations__ = {name: readable(hint, twins) for name, hint in hints.items()}
    twin.__required_keys__, twin.__optional_keys__ = original.__required_keys__, original.__optional_keys__
    return twin
