"""`worlds try`: an episode of random or scripted calls in the terminal."""

import asyncio
import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.base.messages import (
    CallError,
    Content,
    ToolCall,
    ToolInfrastructureError,
    ToolResult,
    ToolSpec,
    text_of,
)
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.commands.worlds.random_calls import NoLegalCall, RandomCalls
from agentfactory.commands.worlds.subject import Subject
from agentfactory.rollout.chains.opening_prompt import opening_messages
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.store import with_files
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset

_LONGEST = 4000
"""Characters of an observation that are shown."""


class WorldFailed(Exception):
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
    """Play the episode and print it turn by turn.

    Raises:
        SettingError: the world needs rows and has none, or its rows cannot be made.
        WorldFailed: the world raises, hangs or prints.
    """
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
            raise WorldFailed(_named(name, told)) from None
        if verdict is None:
            show("reward: none of its own; a recipe's `rewards` judge the chain")
        else:
            show(f"reward: {', '.join(f'{key} {value:g}' for key, value in _numbers(verdict.to_json()))}")
        if text := printed().strip():
            told = "prints to stdout, which breaks the protocol of a server that runs on it"
            raise WorldFailed(f"{name} {told}: {_short(text, 200)!r}")


def _numbers(verdict: dict[str, Any]) -> list[tuple[str, float]]:
    return [(key, value) for key, value in verdict.items() if not isinstance(value, list)]


def _origin(subject: Subject, episode: Episode, rows: int) -> str:
    if episode.row is not None:
        return "task of --row"
    if not rows:
        return "it needs no task"
    return f"task 1 of {rows:,}" + (f" from {subject.source}" if subject.source is not None else "")


async def _take_turns(
    session: ToolSession, specs: Sequence[ToolSpec], episode: Episode, show: Callable[[str], None]
) -> None:
    """Make the calls. Raises WorldFailed."""
    if not specs:
        raise WorldFailed("it has no tool, so no model can act on it; mark methods with @tool")
    source = RandomCalls([*specs], episode.seed)
    source.see(text_of(session.opening or ""))
    for turn in range(episode.turns if episode.calls is None else len(episode.calls)):
        tool, arguments = source.draw() if episode.calls is None else episode.calls[turn]
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        show(f"turn {turn + 1}: {tool}({_short(given, 300)})")
        result = await session.call(ToolCall(f"call_{turn}", tool, arguments), episode.seconds)
        text = _shown(result.content)
        show(_indented(f"error ({result.error.value}): {text}" if result.error is not None else text))
        if fault := _fault(tool, result, episode):
            raise WorldFailed(fault)
        source.see(text_of(result.content))
        if result.finish:
            show("the world ends the episode")
            return
    show(f"the episode ends after {episode.turns} turns" if episode.calls is None else "there are no more calls")


def _fault(tool: str, result: ToolResult, episode: Episode) -> str | None:
    """Return the fault of the world, and not of the call, that an error shows. A ValueError, and an exception of the
    world's own, may tell the model of its mistake."""
    if result.error is CallError.TIMEOUT:
        return f"{tool} hangs: no answer within --seconds {episode.seconds:g}"
    if result.error is CallError.TOOL_ERROR:
        kind = text_of(result.content).partition(":")[0]
        if kind != "ValueError" and isinstance(getattr(builtins, kind, None), type):
            return f"{tool} raised {_short(text_of(result.content), 300)}"
    return None


@contextmanager
def _recorded() -> Iterator[tuple[Callable[[str], None], Callable[[], str]]]:
    """Record what is printed. Yield a function that prints nevertheless, and one that returns the record."""
    terminal, record = sys.stdout, io.StringIO()

    def show(text: str) -> None:
        print(text, file=terminal, flush=True)

    with redirect_stdout(record):
        yield show, record.getvalue


def _named(name: str, fault: str) -> str:
    return fault if name in fault else f"{name}: {fault}"


def _shown(content: Content) -> str:
    return _short(text_of(content), _LONGEST)


def _short(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[: most - 20]} ... ({len(text):,} characters)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
