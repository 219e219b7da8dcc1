"""Tests of `@tool` schemas: many signatures, checked against the JSON Schema standard, pydantic, and argument sets.

Each signature comes with values that are accepted unchanged (`good`, accepted by the schema as well), values that only
our coercion accepts (`coerced`, which the schema alone refuses), and values that are refused (`bad`)."""

import dataclasses
import datetime
import enum
import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import jsonschema
import pytest
from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from agentfactory.tools.tool import InvalidArguments, tool

DRAFT = jsonschema.Draft202012Validator


@dataclasses.dataclass
class Case:
    """One signature with its values, which are passed as the argument x. `As(given, wanted)`: the tool gets `given` as
    `wanted`."""

    function: Callable[..., Any]
    good: list[Any]
    coerced: list[Any]
    bad: list[tuple[Any, str]]
    beyond_schema: list[tuple[Any, str]]
    """Values that are refused, although no schema can express that."""


class As(NamedTuple):
    given: Any
    wanted: Any


class Args(dict[str, Any]):
    """All arguments of a call, if x is not the only one or is left out."""


CASES: list[Case] = []


def case(
    annotation: Any,
    good: list[Any],
    bad: list[tuple[Any, str]],
    coerced: Sequence[Any] = (),
    beyond_schema: Sequence[tuple[Any, str]] = (),
    name: str = "",
) -> None:
    """Keep the case of a function with an argument x of this annotation, or of the function itself."""

    def it(x): ...  # type: ignore[no-untyped-def]

    it.__annotations__ = {"x": annotation}
    it.__name__ = name or f"case {len(CASES)}"
    CASES.append(Case(it, good, list(coerced), bad, list(beyond_schema)))


def case_of(good: list[Any], bad: list[tuple[Any, str]]) -> Callable[[Callable[..., Any]], None]:
    return lambda function: CASES.append(Case(function, good, [], bad, []))


class Color(enum.Enum):
    """A colour of the palette."""

    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Query(TypedDict):
    text: str
    limit: NotRequired[int]


class User(BaseModel):
    """Somebody."""

    name: str = Field(min_length=1, description="What others call them.")
    age: int | None = None


class Tree(BaseModel):
    label: str
    children: list["Tree"] = []


@case_of(
    good=[Args(x=1, y="a"), Args(x=1, y="a", z=2.0)], bad=[(Args(x=1), "y is missing"), (Args(), "x is missing; y")]
)
def several(x: int, y: str, z: float = 0.5) -> None: ...


@case_of(good=[Args()], bad=[(Args(x=1), r"x is not an argument of it \(it takes no arguments\)")])
def no_arguments() -> None: ...


@case_of(good=[Args(json="{}", copy=2, _x=1)], bad=[(Args(json="", copy="two"), "copy: .*valid integer")])
def awkward_names(json: str, copy: int, _x: int = 0, model_config: bool = True) -> None: ...


@case_of(good=["a", None, Args()], bad=[(1, "valid string, got 1"), (Args(y=1), "y is not an argument")])
def optional_text(x: str | None = None) -> None: ...


@case_of(
    good=[Args(), As("blue", Color.BLUE), As(Args(y=["red"]), Args(y=[Color.RED]))],
    bad=[("green", "x: "), (Args(y=["red", 1]), "y.1: ")],
)
def enum_defaults(x: Color = Color.RED, y: list[Color] | None = None) -> None: ...


@case_of(good=[5, As(Args(), 7)], bad=[(-1, "greater than 0, got -1")])
def field_as_default(x: int = Field(7, gt=0, description="How many.")) -> None: ...


@case_of(
    good=[
        As(Args(), Args(x=Point(1, 2), y=User(name="Ada"), z=(1,))),
        As({"x": 4}, Point(4)),
        As(Args(z=[2]), Args(z=(2,))),
    ],
    bad=[({}, "x.x is missing"), (Args(y={"name": ""}), "y.name: "), (Args(z=["a"]), "z.0: ")],
)
def rich_defaults(x: Point = Point(1, 2), y: User = User(name="Ada"), z: tuple[int, ...] = (1,)) -> None: ...  # noqa: B008


case(str, ["a", "", "3"], [(3, "valid string, got 3"), (None, "got null"), (["a"], r'got \["a"\]')])
case(int, [3, -1, 0], [("three", "valid integer"), (2.5, "got 2.5"), ([], "got")], coerced=[As("3", 3), As(True, 1)])
case(
    float,
    [1.5, As(3, 3.0), -0.0],
    [("cheap", "valid number, unable"), ({}, "valid number")],
    coerced=[As("1.5", 1.5)],
    beyond_schema=[(float("nan"), "finite number"), (float("inf"), "finite number")],
)
case(list[int], [[1, 2], []], [(1, "valid list"), (["a"], "x.0: ")], coerced=[As("[1, 2]", [1, 2]), As(["1"], [1])])
case(
    tuple[int, int],
    [As([1, 2], (1, 2))],
    [([1], "x.1 is missing"), ([1, "b"], "x.1: ")],
    coerced=[As("[1, 2]", (1, 2))],
)
case(dict[str, int], [{"a": 1}, {}], [({"a": "b"}, "x.a: "), ([1], "an object")], coerced=[As('{"a": 1}', {"a": 1})])
case(Any, [1, "a", None, [1, {"b": 2}]], [(Args(), "x is missing")], name="anything")
case(int | None, [3, None], [("three", "integer"), (Args(), "x is missing")], coerced=[As("3", 3)])
case(int | str, [3, "3", "a"], [([], "valid integer, or: Input should be a valid string, got"), (None, "got null")])
case(
    list[int] | dict[str, str] | Literal["all"],
    [[1], {"a": "b"}, "all"],
    [("none", "x: "), ([["a"]], "x.0: "), (3, "x: ")],
)
case(Literal["up", "down"], ["up", "down"], [("left", "'up' or 'down', got \"left\""), (1, "'up' or 'down'")])
case(Color, [As("red", Color.RED)], [("green", "'red' or 'blue', got \"green\""), (["red"], "x: ")])
case(Query, [{"text": "a"}, {"text": "a", "limit": 3}], [({"limit": 3}, "x.text is missing"), ("a", "x: ")])
case(
    Point,
    [As({"x": 1, "y": 2}, Point(1, 2)), As({"x": 1}, Point(1))],
    [({"y": 2}, "x.x is missing"), ({"x": "a"}, "x.x: "), (3, "x: Input should be an object, got 3")],
    coerced=[As('{"x": 1}', Point(1)), As({"x": "1"}, Point(1))],
)
case(
    User,
    [As({"name": "Ada", "age": 36}, User(name="Ada", age=36)), As({"name": "Ada"}, User(name="Ada"))],
    [({"name": ""}, "x.name: String should have at least 1 character"), ({}, "x.name is missing")],
    coerced=[As({"name": "Ada", "age": "36"}, User(name="Ada", age=36))],
)
case(
    Tree,
    [
        As({"label": "a"}, Tree(label="a")),
        As({"label": "a", "children": [{"label": "b"}]}, Tree(label="a", children=[Tree(label="b")])),
    ],
    [({"label": "a", "children": [{"label": "b", "children": [{}]}]}, "x.children.0.children.0.label is missing")],
    name="recursive_model",
)
case(
    Annotated[int, Field(ge=1, le=10)],
    [1, 10],
    [(0, "greater than or equal to 1"), (11, "less than or equal to 10")],
    coerced=[As("5", 5)],
)
case(
    datetime.date,
    [As("2026-11-21", datetime.date(2026, 11, 21))],
    [([], "x: ")],
    beyond_schema=[("soon", "valid date"), ("2026-02-30", "valid date")],
)


def _as_arguments(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Args) else {"x": value}


def _entries(*fields: str) -> list[Any]:
    return [
        pytest.param(tool(case.function), entry, id=f"{case.function.__name__}-{field}-{index}")
        for case in CASES
        for field in fields
        for index, entry in enumerate(getattr(case, field))
    ]


@pytest.mark.parametrize(("function", "entry"), _entries("good", "coerced"))
def test_accepted(function: Any, entry: Any) -> None:
    given, wanted = entry if isinstance(entry, As) else (entry, entry)
    parsed = function.parse_arguments(_as_arguments(given))
    for name, value in _as_arguments(wanted).items():
        assert parsed[name] == value
        assert type(parsed[name]) is type(value)


@pytest.mark.parametrize(("function", "entry"), _entries("bad", "beyond_schema"))
def test_refused(function: Any, entry: Any) -> None:
    value, reason = entry
    with pytest.raises(InvalidArguments, match=reason) as caught:
        function.parse_arguments(_as_arguments(value))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("function", "entry"), _entries("good", "coerced", "bad", "beyond_schema"))
def test_the_schema_says_the_same(function: Any, entry: Any, request: pytest.FixtureRequest) -> None:
    """Check that the tool and its schema accept and refuse the same values, except those that need coercion."""
    field = request.node.callspec.id.split("-")[-2]
    value = entry[0] if (isinstance(entry, tuple) and field != "good") or isinstance(entry, As) else entry
    sent = json.loads(json.dumps(_as_arguments(value)))
    assert DRAFT(function.spec.parameters).is_valid(sent) == (field in ("good", "beyond_schema"))


def _expanded(node: Any, definitions: dict[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Return a schema without titles, with every `$ref` expanded up to its fourth nesting within itself."""
    if isinstance(node, list):
        return [_expanded(item, definitions, path) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        if path.count(name) == 3:
            return "..."
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _expanded({**definitions[name], **beside}, definitions, (*path, name))
    return {
        key: {name: _expanded(child, definitions, path) for name, child in value.items()}
        if key == "properties"
        else _expanded(value, definitions, path)
        for key, value in node.items()
        if key not in ("title", "$defs", "discriminator")
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_schemas(case: Case) -> None:
    schema = tool(case.function).spec.parameters
    DRAFT.check_schema(schema)
    if "typed_dict_of_typing" not in case.function.__name__:  # which pydantic itself takes only on newer Pythons
        theirs = TypeAdapter(case.function).json_schema()
        assert _expanded(schema, schema.get("$defs", {})) == _expanded(theirs, theirs.get("$defs", {}))

    written = json.dumps(schema)
    recursive = case.function.__name__ == "recursive_model"
    assert ("$ref" in written) == ("$defs" in schema) == recursive
    assert "title" not in schema["properties"].get("x", {})
    assert not {"Color", "Point", "User", "Query"} & set(re.findall(r'"title": "(\w+)"', written))


def test_what_models_read() -> None:
    @tool
    def paint(place: Point, hue: Color = Color.RED, note: str | None = None) -> None:
        """Paint.

        Args:
            place: Where.
        """

    assert json.dumps(paint.spec.parameters) == json.dumps(  # including the order
        {
            "type": "object",
            "properties": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
                    "required": ["x"],
                    "description": "Where.",
                },
                "hue": {
                    "description": "A colour of the palette.",
                    "enum": ["red", "blue"],
                    "type": "string",
                    "default": "red",
                },
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            },
            "required": ["place"],
            "additionalProperties": False,
        }
    )
