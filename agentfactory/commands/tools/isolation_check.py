"""A check that chains are isolated: the same calls in two chains, one after the other."""

import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentfactory.base.messages import ToolCall, ToolSpec, properties_of, required_of, text_of
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset

_CALL_SECONDS = 10.0
_FOLDER = re.compile(r"[^\s\"']*agentfactory-chains-\w+/\w+")


class Seen(NamedTuple):
    """The result of the check. `proven`: the second chain read a value that only the first had written. Not `tried`: no
    call succeeded that could have changed state."""

    text: str
    proven: bool = False
    tried: bool = True


class _Answer(NamedTuple):
    text: str
    failed: bool


class _Answers(NamedTuple):
    """The answers of one chain, in the order of the tools."""

    reads: list[_Answer]
    writes: list[_Answer]


async def seen_of_another_chain(toolset: Toolset) -> Seen:
    """Make the same calls in two chains and compare the answers.

    Each chain first reads, with the first chain's word as argument, and then writes its own word. So the first chain
    reads the earlier state. Call only tools that are annotated as non-destructive and confined to the server.
    """
    reads, writes = toolset.harmless(reads=True), toolset.harmless(reads=False)
    if not reads and not writes:
        return _untried("no tool is annotated as non-destructive and confined to its server")
    words = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
    first, second = [await _answers(toolset, reads, writes, words[0], word) for word in words]
    for spec, one, other in zip(reads, first.reads, second.reads, strict=True):
        if other.text.count(words[0]) > one.text.count(words[0]) or (one.failed and not other.failed):
            return _leak(spec, other)
    for spec, other in zip(writes, second.writes, strict=True):
        if words[0] in other.text:
            return _leak(spec, other)
    pairs = [
        *zip(reads, first.reads, second.reads, strict=True),
        *zip(writes, first.writes, second.writes, strict=True),
    ]
    for spec, one, other in pairs:
        before, after = _masked(one.text, words[0]), _masked(other.text, words[0], words[1])
        if before != after:
            start = max(0, next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0) - 40)
            return Seen(
                f"{spec.name} answered the same call differently in a second chain: {_short(before[start:])}, then "
                f"{_short(after[start:])}; if the first chain caused this, they share its state"
            )
    worked = [spec for spec, one, other in pairs if not one.failed and not other.failed]
    if len(reads) < len(toolset.specs) and not any(spec in writes for spec in worked):
        if not writes:
            return _untried("no state-changing tool is annotated as non-destructive")
        return _untried(f"no state-changing call succeeded: {writes[0].name} returned {_short(first.writes[0].text)}")
    if not worked:
        return _untried(f"no call succeeded: {reads[0].name} returned {_short(first.reads[0].text)}")
    return Seen(f"two chains that called {', '.join(spec.name for spec in worked)} did not see each other's state")


async def _answers(
    toolset: Toolset, reads: Sequence[ToolSpec], writes: Sequence[ToolSpec], sought: str, word: str
) -> _Answers:
    async with toolset.chain(word, {}) as session:
        return _Answers(
            [await _answer(session, spec, sought) for spec in reads],
            [await _answer(session, spec, word) for spec in writes],
        )


async def _answer(session: ToolSession, spec: ToolSpec, word: str) -> _Answer:
    arguments = _example({"type": "object", **spec.parameters}, spec.parameters, word)
    arguments = arguments if isinstance(arguments, dict) else {}
    result = await session.call(ToolCall("check", spec.name, arguments), _CALL_SECONDS)
    return _Answer(text_of(result.content), result.error is not None)


def _leak(spec: ToolSpec, answer: _Answer) -> Seen:
    return Seen(f"a second chain saw the first one's state: {spec.name} returned {_short(answer.text)}", proven=True)


def _untried(reason: str) -> Seen:
    return Seen(f"isolation was not tried: {reason}; whether chains see each other's state is unknown", tried=False)


def _masked(text: str, *words: str) -> str:
    for word in words:
        text = text.replace(word, "WORD")
    return _FOLDER.sub("FOLDER", text)


def _example(schema: Any, root: dict[str, Any], word: str) -> Any:
    """Return a value that fits `schema`: `word` for a text, and of an object only the required properties."""
    if not isinstance(schema, dict):
        return word
    if (reference := schema.get("$ref")) is not None:
        name = str(reference).rpartition("/")[2]
        definitions = root.get("$defs")
        target = definitions.get(name) if isinstance(definitions, dict) else None
        return _example(target, {**root, "$defs": {}}, word)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    match schema:
        case {"enum": [value, *_]}:
            return value
        case {"anyOf": [option, *_]} | {"oneOf": [option, *_]}:
            return _example(option, root, word)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = properties_of(schema)
            return {name: _example(properties.get(name), root, word) for name in required_of(schema)}
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
