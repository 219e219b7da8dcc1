"""The signatures of tools, as `tools list` and `worlds show` print them."""

import json
from typing import Any

from agentfactory.base.messages import ToolSpec, properties_of, required_of


def signature_of(spec: ToolSpec) -> str:
    """Return names and types, such as `query: string, limit: integer = 5`."""
    required = required_of(spec.parameters)
    shown = []
    for name, schema in properties_of(spec.parameters).items():
        has_default = isinstance(schema, dict) and "default" in schema
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)}" if has_default else ""
        optional = "" if name in required or default else "?"
        shown.append(f"{name}{optional}: {_kind(schema)}{default}")
    return ", ".join(shown)


def _kind(schema: Any) -> str:
    """Return the type in a schema, which may have any shape."""
    match schema:
        case {"enum": [*values]}:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        case {"anyOf": [*options]}:
            return " | ".join(_kind(option) for option in options)
        case {"type": "array"}:
            return f"list of {_kind(schema.get('items'))}"
        case {"type": str(kind)}:
            return kind
        case {"type": [*kinds]}:
            return " | ".join(map(str, kinds))
    return "any"
