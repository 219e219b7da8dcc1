"""Schemas as servers send them: valid ones that Python's libraries cannot use, and wrong ones.

Made from situations of public reports. Each case has arguments that must pass, arguments that must be refused (None: no
part is checked that could refuse any), and the part that the warning must name ("": no warning)."""

from typing import Any, NamedTuple


class Rough(NamedTuple):
    name: str
    schema: Any
    passes: dict[str, Any]
    refused: dict[str, Any] | None
    unchecked: str = ""


def _of(more: dict[str, Any] | None = None, /, **properties: Any) -> dict[str, Any]:
    return {**(more or {}), "type": "object", "properties": properties}


_TEXT, _INT = {"type": "string"}, {"type": "integer"}
_DRAFT = {n: f"http://json-schema.org/draft-0{n}/schema#" for n in (3, 4, 7)}
_DRAFT2020 = "https://json-schema.org/draft/2020-12/schema"
_NODE = {
    "type": "object",
    "properties": {"name": _TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["name"],
}

SCHEMAS = [
    # references
    Rough("dangling", _of(x={"$ref": "#/$defs/Nope"}, y=_INT), {"x": 1}, {"y": "a"}, "properties.x.$ref"),
    Rough(
        "circle",
        {
            "allOf": [{"$ref": "#/$defs/a"}],
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
        },
        {},
        None,
        "$ref ('#/$defs/",
    ),
    Rough(
        "recursive",
        _of({"$defs": {"node": _NODE}}, root={"$ref": "#/$defs/node"}),
        {"root": {"name": "a", "children": [{"name": "b"}]}},
        {"root": {"name": "a", "children": [{}]}},
    ),
    Rough("anchor", _of({"$defs": {"Q": {"$anchor": "here", **_INT}}}, q={"$ref": "#here"}), {"q": 1}, {"q": "a"}),
    Rough(
        "elsewhere",
        _of({"x": {"Q": {"type": "strng", "minimum": 3}}}, q={"$ref": "#/x/Q"}),
        {"q": 4},
        {"q": 1},
        "x.Q.type",
    ),
    Rough(
        "dynamic-ref", _of({"$dynamicAnchor": "n"}, c={"$dynamicRef": "#n"}, v=_INT), {"c": {"v": 1}}, {"c": {"v": "a"}}
    ),
    # patterns
    Rough("unicode-class", _of(s={"type": "string", "pattern": r"^\p{L}+$"}), {"s": "1"}, {"s": 1}, "s.pattern"),
    Rough("slow-pattern", _of(s={"pattern": "^(a+)+$"}), {"s": "a" * 40}, {"s": "b"}),
    Rough(
        "key-pattern",
        {"type": "object", "patternProperties": {r"^\p{L}": _INT}, "additionalProperties": False},
        {"é": "a"},
        None,
        "patternProperties.",
    ),
    # values of keywords
    Rough("required-true", _of(s={"type": "string", "required": True}), {}, {"s": 1}, "s.required (True)"),
    Rough("required-text", _of({"required": "s"}, s=_TEXT), {}, {"s": 1}, "required ('s')"),
    Rough(
        "python-types",
        _of(s={"type": "str"}, f={"type": "float"}, d=_INT),
        {"s": 1, "f": "a"},
        {"d": "a"},
        "s.type ('str')",
    ),
    Rough("enum-null", _of(s={"type": "string", "enum": None, "description": None}), {"s": "a"}, {"s": 1}, "s.enum"),
    Rough("items-list", _of(a={"type": "array", "items": [_TEXT]}), {"a": [1]}, {"a": 1}, "a.items"),
    Rough(
        "not-hole",  # the other `not` still refuses
        _of(s={"not": {"pattern": r"\p{L}"}}, t={"not": _TEXT}),
        {"s": "a"},
        {"t": "a"},
        "s.not.pattern",
    ),
    Rough("one-of-hole", _of(s={"oneOf": [{"pattern": r"^\p{L}"}, _TEXT]}), {"s": "a"}, None, "s.oneOf.0.pattern"),
    Rough(
        "unevaluated-hole",
        {"type": "object", "allOf": [{"$ref": "#/nope"}], "unevaluatedProperties": False},
        {"a": 1},
        None,
        "allOf.0.$ref",
    ),
    Rough(
        "maximum-hole",
        _of(a={"contains": {"pattern": r"\p{L}"}, "maxContains": 1}, b={"contains": _INT, "maxContains": 1}),
        {"a": [1, 2], "b": [1]},
        {"b": [1, 2]},
        "a.contains.pattern",
    ),
    Rough(
        "if-hole",
        _of(s={"if": {"$ref": "#/nope"}, "then": {"minLength": 9}, "type": "string"}),
        {"s": "a"},
        {"s": 1},
        "s.if.$ref",
    ),
    # numbers
    Rough("cents", _of(n={"type": "number", "multipleOf": 0.01}), {"n": 0.07}, {"n": 0.071}),
    Rough("large-whole", _of(n={"type": "integer", "maximum": 9007199254740991}), {"n": 5.0}, {"n": 2**53}),
    # shapes
    Rough("php-list", {"type": "object", "properties": []}, {"a": 1}, None, "properties ([])"),
    Rough("type-of-root", {"type": "string", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}, "type ('string')"),
    # drafts
    Rough("draft-03", _of({"$schema": _DRAFT[3]}, n={"type": "integer", "required": True}), {"n": 1}, {}),
    Rough("draft-04", _of({"$schema": _DRAFT[4]}, n={"minimum": 0, "exclusiveMinimum": True}), {"n": 1}, {"n": 0}),
    Rough(
        "draft-07",
        _of({"$schema": _DRAFT[7]}, a={"items": [_TEXT]}, i={"if": _TEXT, "then": {"minLength": 2}}),
        {"a": ["b"]},
        {"a": [1]},
    ),
    Rough(
        "draft-2020",
        _of({"$schema": _DRAFT2020}, a={"prefixItems": [_TEXT], "items": False}),
        {"a": ["b"]},
        {"a": ["b", 1]},
    ),
    Rough(
        "draft-inside",
        _of(n={"$schema": _DRAFT[4], "multipleOf": 0.01}, m={"$schema": {}}),
        {"n": 0.07, "m": 1},
        {"n": 0.071},
    ),
    Rough(
        "dependencies",
        _of({"$schema": _DRAFT[7], "dependencies": {"a": ["b"], "c": {"required": ["d"]}, "e": 5}}, a=_TEXT),
        {"a": "x", "b": 1},
        {"a": "x"},
        "dependencies.e",
    ),
]

NOT_OBJECTS: list[Any] = [None, True, [], "object", 5]
"""Schemas that are no objects, in whose place models see one without properties."""
