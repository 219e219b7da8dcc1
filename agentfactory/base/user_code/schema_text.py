"""JSON Schemas for models: self-contained, and like pydantic's, but without parts that only cost prompt tokens."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

_ORDER = ("type", "properties", "required", "additionalProperties", "$defs")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_PREFIX = "#/$defs/"


def schema_of(arguments: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a tool's arguments, inlined. Raises PydanticUserError."""
    generated = arguments.model_json_schema(schema_generator=_PlainSchema)
    schema = inline({"properties": {}} | generated | {"additionalProperties": False})
    return {key: schema[key] for key in _ORDER if key in schema}


def inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace the references in `schema` with the definitions in its `$defs`, unless they are recursive."""
    definitions: dict[str, Any] = schema.get("$defs", {})
    endless = {name for name in definitions if name in _reachable(name, definitions)}

    def resolve(node: Any) -> Any:
        name = _target(node)
        if name is None or name in endless:
            return _map_children(node, resolve)
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return resolve(definitions[name]) | _map_children(beside, resolve)

    resolved: dict[str, Any] = resolve({key: value for key, value in schema.items() if key != "$defs"})
    if endless:
        resolved["$defs"] = {name: _map_children(definitions[name], resolve) for name in definitions if name in endless}
    return resolved


class _PlainSchema(GenerateJsonSchema):
    """pydantic's JSON Schema in the order of declaration, without titles derived from names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

    def generate(self, schema: Any, mode: Any = "validation") -> Any:
        generated = super().generate(schema, mode)
        for name, definition in generated.get("$defs", {}).items():
            # a title derived from the class, whose name (possibly after its module's) is the definition's name
            if "title" in definition and name.endswith(self.normalize_name(definition["title"])):
                del definition["title"]
        return generated

    def tagged_union_schema(self, schema: Any) -> Any:
        generated = super().tagged_union_schema(schema)
        generated.pop("discriminator", None)  # an OpenAPI keyword that refers to `$defs`; the alternatives suffice
        return generated


def _reachable(start: str, definitions: dict[str, Any]) -> set[str]:
    """Return the names of the definitions that `start` refers to, directly or indirectly."""
    found: set[str] = set()

    def visit(node: Any) -> Any:
        name = _target(node)
        if name is not None and name not in found:
            found.add(name)
            visit(definitions[name])
        return _map_children(node, visit)

    visit(definitions[start])
    return found


def _target(node: Any) -> str | None:
    reference = node.get("$ref") if isinstance(node, dict) else None
    return reference.removeprefix(_PREFIX) if isinstance(reference, str) else None


def _map_children(node: Any, change: Callable[[Any], Any]) -> Any:
    """Return `node` with its subschemas changed. Values, such as defaults, are never treated as schemas."""
    if not isinstance(node, dict):
        return node  # `true` and `false` are schemas too
    changed = dict(node)
    for key, value in node.items():
        if key in _MAPS:
            changed[key] = {name: change(child) for name, child in value.items()}
        elif key in _LISTS:
            changed[key] = [change(child) for child in value]
        elif key in _SINGLE:
            changed[key] = change(value)
    return changed
