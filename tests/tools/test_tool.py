"""`@tool`: what becomes of signatures, docstrings and arguments."""

from typing import Any, Literal

import jsonschema
import pytest

from tools.tool import InvalidArguments, is_tool, tool


@tool
def travel(
    city: str,
    days: int,
    price: float = 1.5,
    direct: bool = False,
    seat: Literal["aisle", "window"] = "aisle",
    note: str | None = None,
) -> str:
    """Book a journey,
    there and back.

    Further words that a model does not need.

    Args:
        city: Where to go.
        days (int): How long,
            in days.

    Returns:
        A confirmation: not an argument.
    """
    return f"{city} {days} {price} {direct} {seat} {note}"


def test_spec() -> None:
    assert is_tool(travel)
    assert travel("Rome", 2) == "Rome 2 1.5 False aisle None"
    assert travel.spec.name == "travel"
    assert travel.spec.description == "Book a journey, there and back."
    assert travel.spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to go."},
            "days": {"type": "integer", "description": "How long, in days."},
            "price": {"type": "number", "default": 1.5},
            "direct": {"type": "boolean", "default": False},
            "seat": {"type": "string", "enum": ["aisle", "window"], "default": "aisle"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    jsonschema.Draft202012Validator.check_schema(travel.spec.parameters)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ({"city": "Rome", "days": 2}, {}),
        ({"city": "", "days": -1}, {"city": "", "days": -1}),
        ({"city": "Rome", "days": "2"}, {}),
        ({"city": "Rome", "days": 2.0}, {}),
        ({"city": "Rome", "days": 2, "price": 3}, {"price": 3.0}),
        ({"city": "Rome", "days": 2, "direct": "true"}, {"direct": True}),
        ({"city": "Rome", "days": 2, "seat": "window"}, {"seat": "window"}),
        ({"city": "Rome", "days": 2, "note": "quiet"}, {"note": "quiet"}),
        ({"city": "Rome", "days": 2, "note": None}, {}),
    ],
)
def test_good_arguments(arguments: dict[str, Any], parsed: dict[str, Any]) -> None:
    defaults = {"city": "Rome", "days": 2, "price": 1.5, "direct": False, "seat": "aisle", "note": None}
    assert travel.parse_arguments(arguments) == defaults | parsed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"days": 2}, "city is missing"),
        ({}, "city is missing; days is missing"),
        ({"city": "Rome", "days": "two"}, 'days: Input should be a valid integer, unable to parse .*, got "two"'),
        ({"city": "Rome", "days": 2.5}, "days: Input should be a valid integer.*, got 2.5"),
        ({"city": "Rome", "days": None}, "days: .*, got null"),
        ({"city": 7, "days": 2}, "city: Input should be a valid string, got 7"),
        ({"city": ["Rome"], "days": 2}, r'city: Input should be a valid string, got \["Rome"\]'),
        ({"city": "Rome", "days": 2, "price": "cheap"}, "price: Input should be a valid number"),
        ({"city": "Rome", "days": 2, "direct": "perhaps"}, "direct: Input should be a valid boolean"),
        ({"city": "Rome", "days": 2, "seat": "roof"}, "seat: Input should be 'aisle' or 'window', got \"roof\""),
        ({"city": "Rome", "days": 2, "note": 1}, "note: Input should be a valid string, got 1"),
        ({"city": "Rome", "days": 2, "class": 1}, r"class is not an argument of it \(the arguments are city, days, "),
        ({"city": "x" * 500, "days": [0] * 500}, r"days: .*0, 0, .{0,5}\.\.\."),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArguments, match="^Invalid arguments for travel: .*" + reason):
        travel.parse_arguments(arguments)


def test_no_parameters_and_awkward_names() -> None:
    @tool
    def ping() -> str:
        return "pong"

    @tool
    def dump(json: str, copy: int, _x: int = 0, model_config: bool = True) -> str:
        return json

    assert ping.spec.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert ping.spec.description == ""
    with pytest.raises(InvalidArguments, match="it takes no arguments"):
        ping.parse_arguments({"x": 1})
    assert dump.parse_arguments({"json": "{}", "copy": 2}) == {
        "json": "{}",
        "copy": 2,
        "_x": 0,
        "model_config": True,
    }


def test_methods_leave_self_out() -> None:
    class World:
        @tool
        def step(self, direction: Literal["up", "down"]) -> str:
            return direction

    assert list(World.step.spec.parameters["properties"]) == ["direction"]


def _functions() -> list[tuple[Any, str]]:
    def list_argument(values: list[int]) -> None: ...
    def union(value: int | str) -> None: ...
    def bytes_literal(value: Literal[b"x"]) -> None: ...
    def bare(value) -> None: ...  # type: ignore[no-untyped-def]
    def starred(*values: int) -> None: ...
    def keywords(**values: int) -> None: ...
    def positional(value: int, /) -> None: ...
    def unresolved(value: "Nowhere") -> None: ...
    def bad_default(value: int = "one") -> None: ...  # type: ignore[assignment]
    def none_default(value: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013
    def documented(value: int) -> None:
        """Do.

        Args:
            valve: A slip of the pen.
        """

    return [
        (list_argument, r"list_argument: parameter values .* list\[int\]; use str, int, float, bool, Literal"),
        (union, r"union: parameter value has the unsupported annotation int \| str"),
        (bytes_literal, "bytes_literal: parameter value has the unsupported annotation"),
        (bare, "bare: parameter value has no annotation; use str"),
        (starred, r"starred: parameter \*values: int cannot be filled by name"),
        (keywords, r"keywords: parameter \*\*values: int cannot"),
        (positional, "positional: parameter value: int cannot"),
        (unresolved, "unresolved: an annotation cannot be resolved: name 'Nowhere'"),
        (bad_default, "bad_default: parameter value has the default 'one'"),
        (none_default, "none_default: parameter value has the default None"),
        (documented, r"documented: its docstring describes \['valve'\]"),
        (object(), "not on <object"),
        (int, "not on <class 'int'>"),
    ]


@pytest.mark.parametrize(("function", "reason"), _functions())
def test_refused_functions(function: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        tool(function)
