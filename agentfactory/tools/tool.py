"""`@tool`: turns a Python function or method into a tool that a model can call."""

import inspect
import json
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Annotated, Any, Protocol, TypeVar, cast, get_type_hints

from docstring_parser import ParseError
from docstring_parser import parse as parse_docstring
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentfactory.base.messages import ToolSpec
from agentfactory.base.user_code.schema_text import schema_of

SUPPORTED_ANNOTATIONS = (
    "a type that JSON can express: str, int, float, bool, None, Literal, Enum, list, tuple, dict, TypedDict, "
    "dataclasses, pydantic models, dates, and unions of these"
)
_MAX_REASONS = 5
_MAX_SHOWN = 80
_OBJECT_TYPES = ("model_type", "model_attributes_type", "dataclass_type", "dict_type")

Function = TypeVar("Function", bound=Callable[..., Any])


class InvalidArguments(Exception):
    """A call's arguments do not fit the tool. The message tells the model what was wrong and what is allowed."""


class ToolFunction(Protocol):
    """A function marked by `@tool`, with its specification and argument parser."""

    __name__: str
    spec: ToolSpec
    parse_arguments: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Finish:
    """A tool's result after which the chain ends; created by `finish`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def finish(value: Any = None) -> Finish:
    """Wrap a tool's result, any value that a tool may return, so that the chain ends: `return finish(value)`."""
    return Finish(value)


def tool(function: Function) -> Function:
    """Turn `function` into a tool. It remains callable, and gains `spec` and `parse_arguments`.

    The name is the function's. The description is the first paragraph of its docstring. The arguments are described by
    the docstring (in Google, numpy or Sphinx style) or by `Annotated[..., Field(description=...)]`. Every parameter
    needs an annotation that JSON can express; defaults are kept. A first parameter called `self` marks a method.

    A plain `def` runs in a thread, so it may block. An `async def` runs on the event loop, which saves 0.05 ms per call
    and suits functions that are short or already asynchronous.

    Raises TypeError if a parameter cannot be filled from JSON; the message names the allowed annotations."""
    if not inspect.isfunction(function):
        raise TypeError(f"@tool goes on a function or a method, not on {function!r}")
    name = function.__name__
    try:
        docstring = parse_docstring(inspect.getdoc(function) or "")
    except ParseError as error:
        raise TypeError(f"@tool {name}: its docstring cannot be read: {error}") from None
    description = _one_line((docstring.description or "").split("\n\n")[0])
    entries = [entry for entry in docstring.params if entry.args[0] != "attribute"]
    documented = {entry.arg_name: _one_line(entry.description or "") for entry in entries}
    parameters = _parameters(function, sys._getframe(1))
    if unknown := documented.keys() - parameters.keys():
        raise TypeError(f"@tool {name}: its docstring describes {sorted(unknown)}, which are not parameters")

    # pydantic fields get neutral names, with the real ones as aliases: an argument may be called `json` or `_x`
    fields: dict[str, Any] = {}
    for index, (parameter, (annotation, default)) in enumerate(parameters.items()):
        fields[f"p{index}"] = (_as_field(annotation, parameter, documented.get(parameter)), default)
    # LLMs may write NaN, which is not JSON. `_validate` rejects unknown arguments, because `extra` would also apply to
    # dataclasses and TypedDicts among the arguments.
    arguments_model = create_model(name, __config__=ConfigDict(allow_inf_nan=False), **fields)
    spec = ToolSpec(name, description, schema_of(arguments_model))

    def parse_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
        parsed = _validate(arguments_model, spec, arguments)
        return dict(zip(parameters, parsed.__dict__.values(), strict=True))

    marked = cast(ToolFunction, function)
    marked.spec = spec
    marked.parse_arguments = parse_arguments
    return function


def is_tool(value: object) -> bool:
    return inspect.isroutine(value) and isinstance(getattr(value, "spec", None), ToolSpec)


def _parameters(function: Callable[..., Any], caller: FrameType | None) -> dict[str, tuple[Any, Any]]:
    signature = list(inspect.signature(function).parameters.values())
    if signature and signature[0].name in ("self", "cls"):
        del signature[0]
    parameters = {}
    for parameter in signature:
        name, annotated = parameter.name, parameter.annotation
        where = f"@tool {function.__name__}: parameter"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} {parameter} cannot be filled by name; give each argument its own")
        if annotated is parameter.empty:
            raise TypeError(f"{where} {name} has no annotation; write {name}: str, or use {SUPPORTED_ANNOTATIONS}")
        annotation = _resolve(function, parameter, caller)
        try:
            adapter = TypeAdapter(annotation)
            adapter.json_schema()
        except (PydanticUserError, TypeError) as error:
            problem = f"has the unsupported annotation {annotated!r} ({str(error).splitlines()[0]})"
            raise TypeError(f"{where} {name} {problem}; use {SUPPORTED_ANNOTATIONS}") from None
        default = ... if parameter.default is parameter.empty else parameter.default
        try:
            if default is not ... and not isinstance(default, FieldInfo):
                adapter.validate_python(default, strict=True)
        except ValidationError:
            problem = f"has the default {default!r}, which its annotation {annotated!r} does not allow"
            raise TypeError(f"{where} {name} {problem}") from None
        parameters[name] = (annotation, default)
    return parameters


def _resolve(function: Callable[..., Any], parameter: inspect.Parameter, caller: FrameType | None) -> Any:
    """Resolve the parameter's annotation. Names in a string annotation are looked up where the function is defined."""
    globals_ = inspect.unwrap(function).__globals__
    enclosing: dict[str, Any] = {}
    while caller is not None and caller.f_globals is globals_ and caller.f_locals is not globals_:
        enclosing = {**caller.f_locals, **enclosing}
        caller = caller.f_back
    alone = SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return get_type_hints(alone, globals_, enclosing, include_extras=True)["it"]
    except NameError as error:
        told = f"the annotation {parameter.annotation!r} of {parameter.name} cannot be resolved: {error}"
        raise TypeError(f"@tool {function.__name__}: {told}") from None


def _as_field(annotation: Any, name: str, documented: str | None) -> Any:
    own = FieldInfo.from_annotation(annotation)
    text = next((text for text in getattr(annotation, "__metadata__", ()) if isinstance(text, str)), None)
    description = own.description or documented or text or None
    return Annotated[annotation, Field(alias=own.alias or name, description=description)]


def _validate(model: type[BaseModel], spec: ToolSpec, arguments: dict[str, Any]) -> BaseModel:
    unknown = arguments.keys() - spec.parameters["properties"].keys()
    parsed, faults = _tried(model, arguments)
    # models sometimes write lists and objects as JSON text
    culprits = {str(fault["loc"][0]) for fault in faults}
    read = {key: found for key in culprits if (found := _read_json(arguments.get(key))) is not None}
    if read:
        arguments = arguments | read
        parsed, faults = _tried(model, arguments)
    if parsed is None or unknown:
        raise InvalidArguments(_explain(spec, arguments, sorted(unknown), faults))
    return parsed


def _tried(model: type[BaseModel], arguments: dict[str, Any]) -> tuple[BaseModel | None, list[ErrorDetails]]:
    try:
        return model.model_validate(arguments), []
    except ValidationError as error:
        return None, error.errors(include_url=False, include_context=False)


def _read_json(text: Any) -> list[Any] | dict[str, Any] | None:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (list, dict)) else None


def _explain(spec: ToolSpec, arguments: dict[str, Any], unknown: list[str], faults: list[ErrorDetails]) -> str:
    reasons: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for fault in faults:
        # its location in the arguments, without the names of union members that pydantic inserts
        path: list[Any] = []
        value: Any = arguments
        for part in fault["loc"]:
            if part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value)):
                path.append(part)
                value = value[part]
        where = ".".join(str(part) for part in path)
        if fault["type"] == "missing":
            reasons[f"{where}.{fault['loc'][-1]}".lstrip(".") + " is missing"] = []
        else:
            reason = "Input should be an object" if fault["type"] in _OBJECT_TYPES else fault["msg"]
            reasons.setdefault(where, []).append(reason)
            shown = json.dumps(fault["input"], ensure_ascii=False, default=str)
            given.setdefault(where, shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "...")
    either = {where: ", or: ".join(dict.fromkeys(those)) for where, those in reasons.items()}
    told = [f"{where}: {why}, got {given[where]}" if why else where for where, why in either.items()]
    known = spec.parameters["properties"]
    allowed = f"the arguments are {', '.join(known)}" if known else "it takes no arguments"
    told += [f"{name} is not an argument of it ({allowed})" for name in unknown]
    rest = [f"and {len(told) - _MAX_REASONS} more faults"] if len(told) > _MAX_REASONS else []
    return f"Invalid arguments for {spec.name}: {'; '.join(told[:_MAX_REASONS] + rest)}."


def _one_line(text: str) -> str:
    return " ".join(text.split())
