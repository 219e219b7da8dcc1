"""Tool servers of a recipe, each opened and tried by itself, and a check that their chains are isolated."""

import asyncio
import inspect
import json
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agentfactory.base import messages
from agentfactory.base.config import McpServerConfig, ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import (
    EnvironmentReward,
    EnvironmentRewardError,
    ToolCall,
    ToolInfrastructureError,
    ToolSpec,
)
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.base.user_code.loading import load_object
from agentfactory.launching.reach_early import without_spares
from agentfactory.recipe.load import NO_MODEL
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import Task
from agentfactory.tools.environments.environment import is_environment
from agentfactory.tools.images.coordinates import VIEW_FIELD, Coordinates, ModelView
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

_FOLDER = re.compile(r"[^\s\"']*agentfactory-chains-\w+/\w+")


class Seen(NamedTuple):
    """The result of the check: whether a leak was `proven`, and whether a state-changing call was `tried`."""

    text: str
    proven: bool = False
    tried: bool = True


class _Answer(NamedTuple):
    text: str
    failed: bool


async def seen_of_another_chain(toolset: Toolset) -> Seen:
    """Make the same calls in two chains and compare the answers: each reads, with the first chain's word as argument,
    and then writes its own. Only tools annotated as non-destructive and confined are called."""
    reads, writes = toolset.harmless(reads=True), toolset.harmless(reads=False)
    if not reads and not writes:
        return _untried("no tool is annotated as non-destructive and confined to its server")
    words = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
    answers = []
    for word in words:
        async with toolset.chain(word, {}) as session:
            sought = [(spec, words[0]) for spec in reads] + [(spec, word) for spec in writes]
            answers.append([await _answer(session, *each) for each in sought])
    tried = [*zip([*reads, *writes], *answers, strict=True)]
    for number, (spec, one, other) in enumerate(tried):
        count = other.text.count(words[0])
        is_seen = count > one.text.count(words[0]) or (one.failed and not other.failed)
        if is_seen if number < len(reads) else count:
            text = f"a second chain saw the first one's state: {spec.name} returned {_short(other.text)}"
            return Seen(text, proven=True)
    for spec, one, other in tried:
        before, after = _masked(one.text, words[0]), _masked(other.text, words[0], words[1])
        if before != after:
            start = max(0, next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0) - 40)
            both = f"{_short(before[start:])}, then {_short(after[start:])}; if the first chain caused this, they share"
            return Seen(f"{spec.name} answered the same call differently in a second chain: {both} its state")
    worked = [spec for spec, one, other in tried if not one.failed and not other.failed]
    if len(reads) < len(toolset.specs) and not any(spec in writes for spec in worked):
        if not writes:
            return _untried("no state-changing tool is annotated as non-destructive")
        said = _short(answers[0][len(reads)].text)
        return _untried(f"no state-changing call succeeded: {writes[0].name} returned {said}")
    if not worked:
        return _untried(f"no call succeeded: {reads[0].name} returned {_short(answers[0][0].text)}")
    return Seen(f"two chains that called {', '.join(spec.name for spec in worked)} did not see each other's state")


async def _answer(session: ToolSession, spec: ToolSpec, word: str) -> _Answer:
    arguments = _example({"type": "object", **spec.parameters}, spec.parameters, word)
    arguments = arguments if isinstance(arguments, dict) else {}
    result = await session.call(ToolCall("check", spec.name, arguments), timeout_seconds=10.0)
    return _Answer(messages.text_of(result.content), result.error is not None)


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
        return _example(messages.referred(reference, root), {}, word)
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
            properties = messages.properties_of(schema)
            return {name: _example(properties.get(name), root, word) for name in messages.required_of(schema)}
        case "array":
            return [_example(schema.get("items"), root, word)]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
    return word


def _short(text: str, most: int = 100) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= most else line[: most - 3] + "...")


@dataclass
class TriedServer:
    """The result of opening one server; `needed` are task fields without which there was no reset."""

    name: str
    opened: bool = False
    seconds: float = 0.0
    specs: list[ToolSpec] = field(default_factory=list)
    environment: str = ""
    verdict: EnvironmentReward | None = None
    isolation: list[str] = field(default_factory=list)
    tried: bool = True
    needed: list[str] | None = None
    problems: list[str] = field(default_factory=list)


FindTask = Callable[[], Awaitable[Task | None]]


async def open_each(
    recipe: Recipe, find_task: FindTask | None = None, prepared: Path | None = None
) -> list[TriedServer]:
    """Open all servers, each alone. With `find_task`, begin a chain on each with its task; without one, reset none."""
    parts = [ToolsRecipe(tools=[reference]) for reference in recipe.tools]
    parts += [ToolsRecipe(mcp_servers={name: without_spares(config)}) for name, config in recipe.mcp_servers.items()]
    return await asyncio.gather(*(_open(part, find_task, recipe, prepared) for part in parts))


async def _open(part: ToolsRecipe, find_task: FindTask | None, recipe: Recipe, prepared: Path | None) -> TriedServer:
    server = TriedServer([*part.mcp_servers, *(reference.rpartition(":")[2] for reference in part.tools)][0])
    started = time.perf_counter()
    try:
        async with open_toolset(part, Path.cwd()) as toolset:
            server.opened, server.seconds = True, time.perf_counter() - started
            server.specs = toolset.specs
            if toolset.environments and not server.specs and not toolset.judges_predictions:
                server.problems.append("an environment without a tool: no model can act on it; mark methods with @tool")
            if find_task is None:
                return server
            server.isolation = toolset.isolation
            if toolset.isolation and not toolset.environments:
                entry = next(iter(part.mcp_servers.values()))
                if (writes := toolset.harmless(reads=False)) and not entry.has_folders:
                    names = ", ".join(spec.name for spec in writes)
                    print(f"{server.name}: calls {names}; its data may keep entries called check-...", flush=True)
                seen = await seen_of_another_chain(toolset)
                server.isolation.append(seen.text)
                server.tried = seen.tried
                if seen.proven and entry.isolation is None:
                    fix = "give each chain a folder by ${chain} in args, env or cwd, or set isolation: shared"
                    server.problems.append(f"chains share its state; fix: {fix}")
                return server
            task: Task | None = await find_task() if toolset.environments else {}
            if task is None:
                server.needed = [*toolset.needed]
                server.environment = f"an environment: {await _made(part, prepared)}"
            else:
                started = time.perf_counter()
                async with toolset.chain("check", for_tools(task, toolset, recipe)) as session:
                    seconds = time.perf_counter() - started
                    if toolset.environments:
                        says = f", says {_short(messages.text_of(session.opening), 60)}" if session.opening else ""
                        server.environment = f"an environment: reset in {seconds:.2f} s{says}"
                        # an error here would also fail every chain that ends without a call
                        verdict = server.verdict = await session.reward()
                        given = {} if verdict is None else {"reward": verdict.reward, **verdict.metrics}
                        figures = ", ".join(f"{name} {value:g}" for name, value in given.items())
                        server.environment += f"; without any call, {figures}" if figures else "; gives no reward"
    except EnvironmentRewardError as error:
        server.environment += "; cannot give a reward"
        server.problems.append(f"{error} (right after reset; a chain may end without a call)")
    except (ToolInfrastructureError, ValueError, TypeError) as error:
        server.problems.append(str(error).removeprefix(f"tool server {server.name}: "))
    return server


async def _made(part: ToolsRecipe, prepared: Path | None) -> str:
    """Create the environment of `part`, which checks its options, if that is possible here; describe the result."""
    (config,) = part.mcp_servers.values() if part.mcp_servers else (McpServerConfig(module=part.tools[0]),)
    waits = prepared is not None and not prepared.exists() and str(prepared) in json.dumps(config.options)
    if config.module is None or waits:
        return "not created" if waits else "not reset"
    environment = load_object(config.module, Path.cwd(), prebuilt())
    if not is_environment(environment):
        return "not reset"
    started = time.perf_counter()
    try:
        instance = await run_in_thread(lambda: environment(**config.options))
    except Exception as error:  # boundary: user code
        if isinstance(error, SettingError):
            raise error.at(field=f"options.{error.field}") from None
        raise ToolInfrastructureError(f"cannot be created: {type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - started
    if inspect.iscoroutinefunction(instance.close):
        await instance.close()
    else:
        await run_in_thread(instance.close)
    return f"created in {seconds:.2f} s, but not reset"


def for_tools(task: Task, toolset: Toolset, recipe: Recipe) -> Task:
    """Return a row with the model's image coordinates, or pixels, if a reset needs them."""
    if not toolset.takes(VIEW_FIELD):
        return task
    view, why = model_view(recipe)
    if view is None:
        told = "the model's image coordinates are unknown, so this check uses pixels of the file"
        print(f"model.path: got {recipe.model.path!r}: {told}{why}", file=sys.stderr)
        return task
    return {**task, VIEW_FIELD: view.to_json()}


def model_view(recipe: Recipe) -> tuple[ModelView | None, str]:
    """Return the image coordinates of the recipe's model, or None and the reason."""
    stated = recipe.rollout.coordinates
    if recipe.model.path == NO_MODEL:
        return None, ""
    from agentfactory.rollout.images.families import view_of_model

    try:
        return view_of_model(recipe.model, stated), "; fix: set rollout.coordinates"
    except FileNotFoundError as error:
        if stated in ("auto", Coordinates.RESIZED):
            return None, f": {error}"
        return ModelView(Coordinates(stated)), ""
