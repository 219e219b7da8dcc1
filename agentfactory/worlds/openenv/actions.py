"""Actions in words: the fields of a JSON schema, and the tools that an environment offers."""

import json
from typing import Any

from agentfactory.base.messages import properties_of, required_of
from agentfactory.base.user_code.schema_text import inline

_BOUNDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems"),
)
_OF_TOOLS = ("call_tool", "list_tools")


def calls_tools(schema: dict[str, Any]) -> bool | None:
    """Return whether actions of a schema are OpenEnv's calls of tools; None if only the server knows: the base of all
    actions has no fields, and stands for any."""
    own = _own_fields(schema)
    kind = own.get("type")
    if isinstance(kind, dict) and kind.get("const") in _OF_TOOLS:
        return True
    return None if not own else False


def in_words(schema: dict[str, Any]) -> str:
    """Describe the actions of a schema. Raises KeyError, TypeError or RecursionError if it cannot be read."""
    schema = inline(schema)
    if _own_fields(schema):
        return "An action is an object with these fields:\n" + "\n".join(_lines(schema))
    kind = _kind({**schema, "properties": {}})
    return "An action is an empty object." if kind == "object" else f"An action is: {kind}"


def tools_in_words(tools: list[dict[str, Any]]) -> str:
    """Describe actions that call tools, each with `name`, `description` and `input_schema`. Raises like `in_words`."""
    told = ['An action calls a tool: {"tool_name": NAME, "arguments": {...}}. The tools:']
    for tool in tools:
        about = " ".join(str(tool.get("description") or "").split())
        schema = inline(tool.get("input_schema") or {})
        lines = _lines(schema) or ["- no arguments"]
        told.append("\n".join([f"{tool['name']}: {about}" if about else str(tool["name"]), *lines]))
    return "\n\n".join(told)


def _own_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields other than the `metadata` that every action may have."""
    optional = properties_of(schema).keys() - {*required_of(schema)}
    return {key: value for key, value in properties_of(schema).items() if key != "metadata" or key not in optional}


def _lines(schema: dict[str, Any]) -> list[str]:
    required, lines = required_of(schema), []
    for name, each in _own_fields(schema).items():
        kind = [_kind(each)]
        if name not in required:
            has_default = isinstance(each, dict) and "default" in each
            kind.append(f"default {json.dumps(each['default'], ensure_ascii=False)}" if has_default else "optional")
        about = " ".join(str(each.get("description") or "").split()) if isinstance(each, dict) else ""
        lines.append(f"- {name} ({', '.join(kind)})" + (f": {about}" if about else ""))
    return lines


def _kind(schema: Any) -> str:
    match schema:
        case {"const": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"enum": [*values]}:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        case {"anyOf": [*kinds]} | {"oneOf": [*kinds]} | {"type": [*kinds]}:
            return " | ".join(_kind(kind if isinstance(kind, dict) else {"type": kind}) for kind in kinds)
        case {"type": "array"}:
            kind = f"list of {_kind(schema.get('items'))}"
        case {"type": "object", "properties": dict(fields)} if fields:
            required = required_of(schema)
            inner = (f"{name}{'' if name in required else '?'}: {_kind(each)}" for name, each in fields.items())
            kind = f"object {{{', '.join(inner)}}}"
        case {"type": str(kind)}:
            pass
        case _:
            return "any"
    bounds = [f"{key} {json.dumps(schema[key], ensure_ascii=False)}" for key in _BOUNDS if key in schema]
    return " ".join([kind, *([f"[{', '.join(bounds)}]"] if bounds else [])])
