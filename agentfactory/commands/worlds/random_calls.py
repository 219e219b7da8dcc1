"""Random calls that fit the schemas of tools."""

import json
import random
import re
import string
from typing import Any

from agentfactory.base.messages import ToolSpec, properties_of, required_of
from agentfactory.tools.calls.argument_check import ArgumentCheck, UncheckedError

_DRAWS = 200
_MOST_DEPTH = 6
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


class NoLegalCall(ValueError):
    """No draw fitted a tool's schema; the message names the tool and the fault."""


class RandomCalls:
    """A generator of calls: the same seed and observations give the same calls. Texts are made of the words of the last
    observation, among them whole commands in brackets."""

    def __init__(self, specs: list[ToolSpec], seed: int) -> None:
        self._specs, self._random = specs, random.Random(seed)
        self._checks = {spec.name: ArgumentCheck(spec.parameters) for spec in specs}
        self._words: list[str] = []

    def see(self, text: str) -> None:
        """Take the words of an observation."""
        self._words = list(dict.fromkeys([*_BRACKETED.findall(text), *re.findall(r"\w+", text)]))

    def draw(self) -> tuple[str, dict[str, Any]]:
        """Return a tool's name and arguments that fit its schema. Raises NoLegalCall."""
        spec = self._random.choice(self._specs)
        fault: str | None = None
        for _ in range(_DRAWS):
            arguments = self._value({"type": "object", **spec.parameters}, spec.parameters, 0)
            try:
                fault = self._checks[spec.name].fault(arguments)
            except UncheckedError:
                fault = None
            if fault is None:
                return spec.name, arguments
        raise NoLegalCall(
            f"no random call fits the schema of {spec.name}: {fault}; fix: give calls by --calls FILE.jsonl"
        )

    def _value(self, schema: Any, root: dict[str, Any], depth: int) -> Any:
        chance = self._random
        if not isinstance(schema, dict):
            return self._text({})
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(_target(reference, root), root, depth + 1)
        if "const" in schema:
            return schema["const"]
        for key in ("enum", "examples"):
            if isinstance(schema.get(key), list) and schema[key]:
                return chance.choice(schema[key])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._value(chance.choice(schema[key]), root, depth + 1)
        if isinstance(schema.get("allOf"), list):
            merged = {key: value for part in schema["allOf"] if isinstance(part, dict) for key, value in part.items()}
            return self._value({**merged, **{k: v for k, v in schema.items() if k != "allOf"}}, root, depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kind = chance.choice(kind)
        match kind:
            case "object":
                required = required_of(schema)
                names = [
                    n for n in properties_of(schema) if n in required or (depth < _MOST_DEPTH and chance.random() < 0.5)
                ]
                return {name: self._value(properties_of(schema)[name], root, depth + 1) for name in names}
            case "array":
                least = int(schema.get("minItems", 0))
                most = int(schema.get("maxItems", max(least, 0 if depth >= _MOST_DEPTH else 3)))
                if isinstance(parts := schema.get("prefixItems"), list):
                    return [self._value(part, root, depth + 1) for part in parts]
                count = chance.randint(least, most)
                return [self._value(schema.get("items", {"type": "string"}), root, depth + 1) for _ in range(count)]
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return self._text(schema)

    def _number(self, schema: dict[str, Any], whole: bool) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None:
            low = min(0, high - 10) if high is not None else 0
        if high is None:
            high = max(10, low + 10)
        if not whole:
            return round(self._random.uniform(low, high), 3)
        step = int(schema.get("multipleOf", 1)) or 1
        return self._random.randint(int(-(-low // step)), int(high // step)) * step

    def _text(self, schema: dict[str, Any]) -> str:
        chance = self._random
        numbers = [word for word in self._words if word.isdigit()]
        texts = self._words or [chance.choice(string.ascii_lowercase)]
        text = chance.choice(numbers) if numbers and chance.random() < 0.2 else chance.choice(texts)
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        while len(text) < least:
            text += chance.choice(string.ascii_lowercase)
        return text if most is None else text[: int(most)]


def _target(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, dict) else {}
    return found


def read_calls(text: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse scripted calls: per line {"name": TOOL, "arguments": {...}}. Raises ValueError with the line's number."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            match json.loads(line):
                case {"name": str(tool), **rest} if isinstance(arguments := rest.get("arguments", {}), dict):
                    calls.append((tool, arguments))
                case other:
                    raise ValueError(f"got {str(other)[:60]}")
        except ValueError as error:
            told = f"{name}, line {number}: {error}"
            raise ValueError(f'{told}; fix: write {{"name": "TOOL", "arguments": {{...}}}} per line') from None
    return calls
