"""`worlds try`: an episode of random or scripted calls in the terminal."""

import asyncio
import builtins
import io
import json
import random
import re
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.base import messages
from agentfactory.base.errors import CommandFailed
from agentfactory.base.messages import CallError, Content, ToolCall, ToolInfrastructureError, ToolResult, ToolSpec
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.rollout.chains.opening_prompt import opening_messages
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.store import with_files
from agentfactory.tools.calls.argument_check import ArgumentCheck, UncheckedError
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.commands.subject import Subject

_MOST_DEPTH = 6
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


class NoLegalCall(ValueError):
    """No draw fitted a tool's schema; the message names the tool and the fault."""


class RandomCalls:
    """A reproducible generator of calls, with texts of the last observation's words and bracketed commands."""

    def __init__(self, specs: list[ToolSpec], seed: int) -> None:
        self._specs, self._random = specs, random.Random(seed)
        self._checks = {spec.name: ArgumentCheck(spec.parameters) for spec in specs}
        self._words: list[str] = []

    def see(self, text: str) -> None:
        self._words = list(dict.fromkeys([*_BRACKETED.findall(text), *re.findall(r"\w+", text)]))

    def draw(self) -> tuple[str, dict[str, Any]]:
        """Return a tool's name and arguments that fit its schema. Raises NoLegalCall."""
        spec = self._random.choice(self._specs)
        fault: str | None = None
        for _ in range(200):
            arguments = self._value({"type": "object", **spec.parameters}, spec.parameters, 0)
            try:
                fault = self._checks[spec.name].fault(arguments)
            except UncheckedError:
                fault = None
            if fault is None:
                return spec.name, arguments
        fix = "give calls by --calls FILE.jsonl"
        raise NoLegalCall(f"no random call fits the schema of {spec.name}: {fault}; fix: {fix}")

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
                return {
                    name: self._value(value, root, depth + 1)
                    for name, value in messages.properties_of(schema).items()
                    if name in messages.required_of(schema) or (depth < _MOST_DEPTH and chance.random() < 0.5)
                }
            case "array":
                least = int(schema.get("minItems", 0))
                most = int(schema.get("maxItems", max(least, 0 if depth >= _MOST_DEPTH else 3)))
                items = [schema.get("items", {"type": "string"})] * chance.randint(least, most)
                parts = schema.get("prefixItems")
                return [self._value(part, root, depth + 1) for part in (parts if isinstance(parts, list) else items)]
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return self._text(schema)

    def _number(self, schema: dict[str, Any], whole: bool) -> float:
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0 if high is None else min(0, high - 10)))
        high = max(10, low + 10) if high is None else high
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
        try:
            if line.strip():
                call = json.loads(line)
                calls.append((str(call["name"]), {**call.get("arguments", {})}))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{name}, line {number}: got {line[:60]}") from None
    return calls


_LONGEST = 4000  # characters of an observation that are shown


class WorldFailed(CommandFailed):
    """A world that raises, hangs or prints; the message names it."""


@dataclass
class Episode:
    """Settings of the trial: `row` replaces the first row of the tasks; `calls` replace random calls."""

    turns: int
    seed: int
    seconds: float
    row: Task | None = None
    calls: Sequence[tuple[str, dict[str, Any]]] | None = None


async def play(subject: Subject, episode: Episode) -> None:
    """Play the episode, and print it turn by turn. Raises SettingError, and WorldFailed for a faulty world."""
    name = subject.name
    with _recorded() as (show, printed), TemporaryDirectory(prefix="agentfactory-images-") as images:
        try:
            async with asyncio.timeout(episode.seconds):
                rows = [episode.row] if episode.row is not None else await run_in_thread(subject.rows)
        except TimeoutError:
            source = subject.source or name
            raise WorldFailed(f"{source}: making its rows took longer than --seconds {episode.seconds:g}") from None
        try:
            async with open_toolset(subject.recipe, Path.cwd()) as toolset:
                if lack := subject.missing_rows(toolset, bool(rows)):
                    raise lack
                toolset.check_rows(rows[:1], "data", bool(subject.recipe.rewards))
                task = with_files(rows[0], Path(images)) if rows else {}
                show(f"{name}: {_origin(subject, episode, len(rows))}")
                if task:
                    show(_indented(_short(json.dumps(task, ensure_ascii=False, default=str))))
                if "question" in task or "messages" in task:
                    for message in opening_messages(task, subject.recipe.rollout.system_prompt):
                        show(f"{message['role']}:\n{_indented(_shown(message.get('content') or ''))}")
                async with toolset.chain("try", task) as session:
                    if session.opening is not None:
                        show(f"first observation:\n{_indented(_shown(session.opening))}")
                    if toolset.specs or not toolset.judges_predictions:
                        await _take_turns(session, toolset.specs, episode, show)
                    else:
                        show("it has no tools: the reward reads the model's last message, which is empty here")
                    verdict = await session.reward()
        except (ToolInfrastructureError, NoLegalCall, WorldFailed) as error:
            told = str(error).replace(f"mcp_servers.{name}.timeout_seconds", "--seconds")
            raise WorldFailed(told if name in told else f"{name}: {told}") from None
        if verdict is None:
            show("reward: none of its own; a recipe's `rewards` judge the chain")
        else:
            numbers = {key: value for key, value in verdict.to_json().items() if not isinstance(value, list)}
            show(f"reward: {', '.join(f'{key} {value:g}' for key, value in numbers.items())}")
        if text := printed().strip():
            raise WorldFailed(f"{name} prints to stdout, which breaks a server on stdio: {_short(text, 200)!r}")


def _origin(subject: Subject, episode: Episode, rows: int) -> str:
    if episode.row is not None:
        return "task of --row"
    if not rows:
        return "it needs no task"
    return f"task 1 of {rows:,}" + (f" from {subject.source}" if subject.source is not None else "")


async def _take_turns(
    session: ToolSession, specs: Sequence[ToolSpec], episode: Episode, show: Callable[[str], None]
) -> None:
    if not specs:
        raise WorldFailed("it has no tool, so no model can act on it; mark methods with @tool")
    source = RandomCalls([*specs], episode.seed)
    source.see(messages.text_of(session.opening or ""))
    for turn in range(episode.turns if episode.calls is None else len(episode.calls)):
        tool, arguments = source.draw() if episode.calls is None else episode.calls[turn]
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        show(f"turn {turn + 1}: {tool}({_short(given, 300)})")
        result = await session.call(ToolCall(f"call_{turn}", tool, arguments), episode.seconds)
        text = _shown(result.content)
        show(_indented(f"error ({result.error.value}): {text}" if result.error is not None else text))
        if fault := _fault(tool, result, episode):
            raise WorldFailed(fault)
        source.see(messages.text_of(result.content))
        if result.finish:
            show("the world ends the episode")
            return
    show(f"the episode ends after {episode.turns} turns" if episode.calls is None else "there are no more calls")


def _fault(tool: str, result: ToolResult, episode: Episode) -> str | None:
    """Return the fault of the world that an error shows; a ValueError may tell the model of its own."""
    if result.error is CallError.TIMEOUT:
        return f"{tool} hangs: no answer within --seconds {episode.seconds:g}"
    if result.error is CallError.TOOL_ERROR:
        kind = messages.text_of(result.content).partition(":")[0]
        if kind != "ValueError" and isinstance(getattr(builtins, kind, None), type):
            return f"{tool} raised {_short(messages.text_of(result.content), 300)}"
    return None


@contextmanager
def _recorded() -> Iterator[tuple[Callable[[str], None], Callable[[], str]]]:
    terminal, record = sys.stdout, io.StringIO()

    def show(text: str) -> None:
        print(text, file=terminal, flush=True)

    with redirect_stdout(record):
        yield show, record.getvalue


def _shown(content: Content) -> str:
    return _short(messages.text_of(content), _LONGEST)


def _short(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[: most - 20]} ... ({len(text):,} characters)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
