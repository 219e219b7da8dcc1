"""`check_types`: whether the options that a recipe gives have the types that their taker asks for."""

import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentfactory.tools.errors import SettingError, short


def check_types(options: Mapping[str, Any], taker: Callable[..., Any], field: str) -> None:
    """Raise SettingError for an option that its annotation in `taker`, a function or a dataclass, does not allow.

    An integer is a float, too, and a text a path; nothing else is converted. What JSON cannot express, which only a
    program can give, is not checked.
    """
    try:
        annotations = get_type_hints(taker)
    except NameError:  # of a class within a function
        return
    for name, value in options.items():
        try:
            given, expected = json.dumps(value), TypeAdapter(annotations.get(name, Any))
        except (TypeError, ValueError, PydanticUserError):
            continue
        try:
            expected.validate_json(given, strict=True)
        except ValidationError as error:
            raise SettingError(f"{field}.{name}", f"got {short(value)}: {error.errors()[0]['msg']}") from None
