"""Tests of `@tool`: signatures, docstrings and arguments. Types are tested in test_schemas.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.tool import InvalidArguments, is_tool, tool


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
    with pytest.raises(InvalidArguments, match=r"^Invalid arguments for travel: days: .*0, 0, .{0,5}\.\.\."):
        travel.parse_arguments({"city": "x" * 500, "days": [0] * 500})


def test_methods() -> None:
    class World:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool
        def step(self, direction: Literal["up", "down"]) -> str:
            return self.name + direction

        @classmethod
        @tool
        def make(cls, name: str) -> "World":
            return cls(name)

        @staticmethod
        @tool
        def double(number: int) -> int:
            return 2 * number

    step = World("a").step
    assert is_tool(step)
    assert list(step.spec.parameters["properties"]) == ["direction"]
    assert step(**step.parse_arguments({"direction": "up"})) == "aup"
    assert World.make(**World.make.parse_arguments({"name": "b"})).name == "b"
    assert World.double(**World("c").double.parse_arguments({"number": "4"})) == 8


FUTURE = """
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentfactory.tools.tool import tool

if TYPE_CHECKING:
    from elsewhere import Answer

@dataclass
class Point:
    x: int

Natural = Annotated[int, Field(ge=1)]

def make():
    class Near(Enum):
        HERE = "here"

    class World:
        class Speed(Enum):
            SLOW = "slow"

        @tool
        def go(self, point: Point, near: Near, speed: Speed | None = None, n: Natural = 1) -> Answer:
            return [point, near, speed, n]

    return World()
"""


def test_annotations_that_are_strings(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(FUTURE)
    world = load_object("world.py:make", tmp_path)()
    parsed = world.go.parse_arguments({"point": {"x": "3"}, "near": "here", "speed": "slow"})
    assert (parsed["point"].x, parsed["near"].name, parsed["speed"].name, parsed["n"]) == (3, "HERE", "SLOW", 1)
    with pytest.raises(InvalidArguments, match=r"n: .* greater than or equal to 1"):
        world.go.parse_arguments({"point": {"x": 3}, "near": "here", "n": 0})


GOOGLE = """Find a book.

    Args:
        title (str): Its title,
            or a part of it: "The: One".
        year: The year.

    Returns:
        Its shelf.
    """
NUMPY = """Find a book.

    Parameters
    ----------
    title : str
        Its title,
        or a part of it: "The: One".
    year : int, optional
        The year.
    """
SPHINX = """Find a book.

    :param title: Its title,
        or a part of it: "The: One".
    :param year: The year.
    :returns: Its shelf.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX])
def test_docstring_styles(docstring: str) -> None:
    def find(title: str, year: int = 0) -> str: ...

    find.__doc__ = docstring
    spec = tool(find).spec
    assert spec.description == "Find a book."
    texts = [schema["description"] for schema in spec.parameters["properties"].values()]
    assert texts == ['Its title, or a part of it: "The: One".', "The year."]


def test_a_default_is_not_shared() -> None:
    @tool
    def collect(values: list[int] = []) -> list[int]:  # noqa: B006
        values.append(1)
        return values

    assert [collect(**collect.parse_arguments({})) for _ in range(2)] == [[1], [1]]


def test_a_message_names_each_place_once_and_stays_short() -> None:
    @dataclass
    class Stop:
        name: str
        minutes: int | float

    @tool
    def plan(stops: list[Stop], pace: Literal["slow"] | int) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        plan.parse_arguments({"stops": [{"name": "a", "minutes": "x"}], "pace": "fast", "extra": 1, "more": 2})
    assert str(caught.value) == (
        "Invalid arguments for plan: stops.0.minutes: Input should be a valid integer, unable to parse string as an "
        'integer, or: Input should be a valid number, unable to parse string as a number, got "x"; '
        "pace: Input should be 'slow', or: Input should be a valid integer, unable to parse string as an integer, "
        'got "fast"; extra is not an argument of it (the arguments are stops, pace); '
        "more is not an argument of it (the arguments are stops, pace)."
    )
    with pytest.raises(InvalidArguments, match=r"stops.0.name is missing; .*; and 7 more faults\.$"):
        plan.parse_arguments({"stops": [{}] * 5, "pace": "slow", "a": 1, "b": 2})


def _functions() -> list[tuple[Any, str]]:
    class Odd:
        pass

    def of_a_class(value: Odd) -> None: ...
    def bare(value) -> None: ...  # type: ignore[no-untyped-def]
    def starred(*values: int) -> None: ...
    def unresolved(value: "Nowhere") -> None: ...  # type: ignore[name-defined]
    def bad_default(value: int = "one") -> None: ...  # type: ignore[assignment]
    def documented(value: int) -> None:
        """Do.

        Args:
            valve: A slip of the pen.
        """

    return [
        (of_a_class, r"of_a_class: parameter value .*Odd.*; use a type that JSON can express: str, .*pydantic models"),
        (bare, "bare: parameter value has no annotation; write value: str, or use a type that JSON can express: str"),
        (starred, r"starred: parameter \*values: int cannot be filled by name"),
        (unresolved, "unresolved: the annotation 'Nowhere' of value cannot be resolved: name 'Nowhere' is not defined"),
        (bad_default, "bad_default: parameter value has the default 'one'"),
        (documented, r"documented: its docstring describes \['valve'\]"),
        (object(), "not on <object"),
    ]


@pytest.mark.parametrize(("function", "reason"), _functions())
def test_refused_functions(function: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        tool(function)
