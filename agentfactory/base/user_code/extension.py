"""User functions (`FILE.py:NAME`) that replace built-in ones: loading, and checks of parameters and options."""

import inspect
import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentfactory.base.config import Section
from agentfactory.base.errors import SettingError, short
from agentfactory.base.user_code.loading import load_for


@dataclass(frozen=True)
class Extension:
    """A function with its options; a call passes it only the inputs that it takes."""

    function: Callable[..., Any]
    takes: tuple[str, ...]
    options: Mapping[str, Any]
    field: str = ""
    name: str = ""
    """Name of a user's function, for messages; "" for a built-in one."""

    def __call__(self, **inputs: Any) -> Any:
        """Call the function. An error of a user's function becomes a SettingError with its location."""
        given = {name: inputs[name] for name in self.takes}
        with nullcontext() if not self.name else self.blamed():
            return self.function(**given, **self.options)

    def option(self, name: str) -> Any:
        """Return the value of an option: the recipe's, or else the parameter's default; None if there is neither."""
        parameter = inspect.signature(self.function).parameters.get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return self.options.get(name, default)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Attribute errors raised in this context to the user's function."""
        try:
            yield
        except SettingError:
            raise
        # a user's code may raise anything; a SystemExit must not end a run as if it were finished
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error}".removesuffix(": ")
            problem = f"{self.name} failed: {told} ({Path(last.filename).name}, line {last.lineno})"
            raise SettingError(self.field, problem, "correct it") from error


def load_extension(
    field: str, reference: str, ours: Mapping[str, Callable[..., Any]], inputs: Collection[str], settings: Section
) -> Extension:
    """Load the function that `field` names, from `ours` or `FILE.py:NAME`, with its options. Raises SettingError."""
    options: dict[str, Any] = settings.options  # type: ignore[attr-defined]
    if reference in ours:
        function = ours[reference]
        parameters = inspect.signature(function).parameters
        own = {name: value for name, value in dict(options).items() if name in parameters}
        return Extension(function, _taken(function, inputs), own)
    function = load_for(field, reference, Path.cwd())
    file, _, defined = reference.rpartition(":")
    shown = f"{Path(file).name}:{defined}"
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"of type {type(function).__name__}"
        raise SettingError(field, f"{shown} is {kind}", "name a plain function")
    _check_parameters(field, shown, function, inputs, options)
    return Extension(function, _taken(function, inputs), options, field, shown)


def _taken(function: Callable[..., Any], inputs: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name in inputs)


def _check_parameters(
    field: str, shown: str, function: Callable[..., Any], inputs: Collection[str], options: Mapping[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters
    section = field.rpartition(".")[0]
    given = f"{section}.options" if section else "options"
    if inputs and not _taken(function, inputs):
        problem = f"{shown} takes none of {', '.join(inputs)}"
        raise SettingError(field, problem, "name its parameters after the inputs that it needs")
    takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise SettingError(field, f"{shown} takes {parameter} by position", "arguments are passed by name")
        missing = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if missing and name not in inputs and name not in options:
            fix = f"set {given}.{name}, or give it a default"
            fix += f"; the possible inputs are {', '.join(inputs)}" if inputs else ""
            raise SettingError(field, f"{shown} has a parameter {name!r} without a value", fix)
    known = [name for name, each in parameters.items() if name not in inputs and each.kind is not each.VAR_KEYWORD]
    for name in options:
        if name in inputs or (name not in parameters and not takes_rest):
            problem = f"{shown} has no such option"
            raise SettingError(f"{given}.{name}", problem, f"remove it; its options are {', '.join(known) or 'none'}")


def check_types(options: Mapping[str, Any], taker: Callable[..., Any], field: str) -> None:
    """Raise SettingError for an option whose annotation in `taker` does not allow its value, as far as it is JSON."""
    try:
        annotations = get_type_hints(taker)
    except NameError:  # an annotation names a class within a function
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
