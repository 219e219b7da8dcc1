"""Options that a recipe gives to a user's class or function."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.watch import announced

Known = Mapping[str, inspect.Parameter]


def instantiate(given: type[Any], options: dict[str, Any], label: str, name: str, from_chain: Sequence[str]) -> Any:
    """Create the class `name` of a recipe's field `label` from its options. Raise SettingError; see `check_options`."""
    known = inspect.signature(given).parameters
    check_options(options, known, label, name, from_chain)
    try:
        with announced(f"creating {name} of {label}"):
            return given(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), SettingError):
            raise cause.at(label) from error
        place = ".".join(map(str, (label, "options", *first["loc"])))
        got = f"got {first['input']!r}: " if first["loc"] and first["type"] != "missing" else ""
        problem = got + first["msg"].removeprefix("Value error, ")
        raise SettingError(place, problem, f"correct it; the options of {name} are {', '.join(known)}") from error
    except Exception as error:  # boundary: user code
        problem = f"{name} could not be created: {type(error).__name__}: {error}"
        raise SettingError(f"{label}.options", problem, f"its options are {', '.join(known) or 'none'}") from error


def check_options(options: dict[str, Any], known: Known, label: str, name: str, from_chain: Sequence[str]) -> None:
    """Raise SettingError for an option that is not one of the `known` parameters, or that is filled `from_chain`."""
    for option in options:
        place = f"{label}.options.{option}"
        if option in from_chain:
            fix = "remove it, or give the parameter another name"
            raise SettingError(place, f"{name} gets {option!r} from the chain", fix)
        if option not in known and not takes_row(known):
            takes = ", ".join(parameter for parameter in known if parameter not in from_chain)
            raise SettingError(place, f"{name} has no such option", f"use one of {takes or 'none'}")


def takes_row(parameters: Known) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
