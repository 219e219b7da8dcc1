"""Tries whether a chain sees what another did: the same calls in two chains, one after the other."""

import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentfactory.tools.messages import ToolCall, ToolSpec, text_of
from agentfactory.tools.toolset import Toolset

_CALL_SECONDS = 10.0
_FOLDER = re.compile(r"[^\s\"']*agentfactory-chains-\w+/\w+")


class Seen(NamedTuple):
    """What a second chain saw. `proven`: it was told a word that only the first had used."""

    text: str
    proven: bool = False


async def seen_of_another_chain(toolset: Toolset) -> Seen:
    """Make the same calls in two chains, each with a word of its own, and compare the answers.

    Only tools are called whose annotations say that they destroy nothing and act on nothing outside of the server.
    """
    specs = toolset.harmless
    if not specs:
        return Seen(
            "isolation was not tried: no tool is annotated as one that destroys nothing and stays in its server"
        )
    words = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
    first, second = [await _answers(toolset, specs, word) for word in words]
    for spec, answer in zip(specs, second, strict=True):
        if words[0] in answer:
            return Seen(f"a second chain saw what the first did: {spec.name} answered {_short(answer)}", proven=True)
    for spec, before, after in zip(specs, first, second, strict=True):
        one, other = _masked(before, words[0]), _masked(after, words[1])
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            start = max(0, next((n for n, (a, b) in pairs if a != b), 0) - 40)
            return Seen(
                f"{spec.name} answered the same call otherwise in a second chain: {_short(one[start:])}, then "
                f"{_short(other[start:])}; if that comes from the first chain, they share its state"
            )
    return Seen(f"two chains that called {', '.join(spec.name for spec in specs)} saw nothing of each other")


async def _answers(toolset: Toolset, specs: Sequence[ToolSpec], word: str) -> list[str]:
    async with toolset.chain(word, {}) as session:
        calls = [ToolCall("check", spec.name, _example(spec.parameters, spec.parameters, word)) for spec in specs]
        return [text_of((await session.call(call, _CALL_SECONDS)).content) for call in calls]


def _masked(text: str, word: str) -> str:
    return _FOLDER.sub("FOLDER", text.replace(word, "WORD"))


def _example(schema: Any, root: dict[str, Any], word: str) -> Any:
    """Return a value that fits `schema`: `word` for a text, and of an object only what is required."""
    if not isinstance(schema, dict):
        return word
    if (reference := schema.get("$ref")) is not None:
        name = str(reference).rpartition("/")[2]
        return _example(root.get("$defs", {}).get(name), {**root, "$defs": {}}, word)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _example(options[0], root, word)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _example(properties.get(name), root, word) for name in schema.get("required", [])}
        case "array":
            return [_example(schema.get("items"), root, word)]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
    return word


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 100 else line[:97] + "...")
