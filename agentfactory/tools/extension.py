"""A function of the user's own (`FILE.py:NAME`) in the place of one of ours: loaded, and held to its parameters."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.tools.config import Section
from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code import UserCodeError, load_object


@dataclass(frozen=True)
class Extension:
    """A function with its options; a call hands it those of the inputs that it takes."""

    function: Callable[..., Any]
    takes: tuple[str, ...]
    options: Mapping[str, Any]

    def __call__(self, **inputs: Any) -> Any:
        return self.function(**{name: inputs[name] for name in self.takes}, **self.options)


def load_extension(
    field: str, reference: str, ours: Mapping[str, Callable[..., Any]], inputs: Collection[str], settings: Section
) -> Extension:
    """What `reference`, the value of the recipe's `field`, names: one of `ours`, or `FILE.py:NAME`.

    Its parameters are some of `inputs`, by name, and options: for one of ours, the fields of `settings` that are called
    like them; for the user's own, what `settings.options` says.

    Raises SettingError where it cannot be loaded, is no function, or its parameters do not fit the options.
    """
    if reference in ours:
        function = ours[reference]
        known = type(settings).model_fields
        names = [name for name in inspect.signature(function).parameters if name not in inputs and name in known]
        return Extension(function, _taken(function, inputs), {name: getattr(settings, name) for name in names})
    try:
        function = load_object(reference, Path.cwd())
    except UserCodeError as error:
        raise SettingError(field, f"unknown: {error.problem}", error.fix) from error.__cause__
    if not callable(function):
        raise SettingError(field, f"{reference} is a {type(function).__name__}, not a function", "name a function")
    options: dict[str, Any] = settings.options  # type: ignore[attr-defined]
    _check_parameters(field, reference, function, inputs, options)
    return Extension(function, _taken(function, inputs), options)


def _taken(function: Callable[..., Any], inputs: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name in inputs)


def _check_parameters(
    field: str, reference: str, function: Callable[..., Any], inputs: Collection[str], options: Mapping[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters
    section = field.rpartition(".")[0]
    given = f"{section}.options" if section else "options"
    if inputs and not _taken(function, inputs):
        problem = f"{reference} takes none of {', '.join(inputs)}"
        raise SettingError(field, problem, "name its parameters like what it needs of them")
    takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise SettingError(field, f"{reference} takes {parameter} by its place", "arguments come by name")
        missing = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if missing and name not in inputs and name not in options:
            fix = f"set {given}.{name}, or give it a default"
            fix += f"; what it can be given is {', '.join(inputs)}" if inputs else ""
            raise SettingError(field, f"{reference} has a parameter {name!r} that nothing gives", fix)
    known = [name for name in parameters if name not in inputs]
    for name in options:
        if name in inputs or (name not in parameters and not takes_rest):
            problem = f"{reference} has no such option"
            raise SettingError(f"{given}.{name}", problem, f"remove it; its options are {', '.join(known) or 'none'}")
