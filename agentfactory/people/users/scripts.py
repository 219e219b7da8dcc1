"""The scripts of simulated users: generators that yield the user's messages and get the agent's answers."""

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import (
    Message,
    ToolCall,
    ToolInfrastructureError,
    ToolSpec,
    is_finite_number,
    own_copy,
    text_of,
)
from agentfactory.base.processes.threads import run_in_thread, run_on_loop
from agentfactory.base.user_code.loading import load_for
from agentfactory.base.user_code.options import check_options, instantiate, takes_row
from agentfactory.people.users.policy import policy_of
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.simulated_user import SPEAKER, UserError
from agentfactory.rollout.config import UserConfig
from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.trajectory import Activity
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.tool import Finish

PREBUILT = {"model": "agentfactory.people.users.model_user:ModelUser"}
OFFERED = ("call", "metrics", "policy", "tools")
"""The parameters of a script that the chain fills."""
MOST_CHARACTERS = 1 << 16
"""Maximum length of a user's message."""


class Scripts(AbstractAsyncContextManager["Scripts"]):
    """The script of `rollout.user`, which each chain runs for itself; it is closed on exit. Raise SettingError if it
    cannot be used."""

    def __init__(self, config: UserConfig, base: Path = Path()) -> None:
        self.config = config
        field, self._name, options = "rollout.user", config.name.rpartition(":")[2], dict(config.options)
        self.tool_names = options.pop("tools", [])
        if not isinstance(self.tool_names, list) or not all(isinstance(name, str) for name in self.tool_names):
            raise SettingError(f"{field}.options.tools", f"got {self.tool_names!r}", "list names of the recipe's tools")
        found: Any = load_for(field, config.name, base, PREBUILT)
        if inspect.isclass(found):
            found, options = instantiate(found, options, field, self._name, OFFERED), {}
        function = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004
        self._is_async = inspect.isasyncgenfunction(function)
        if not self._is_async and not inspect.isgeneratorfunction(function):
            fix = "yield the user's messages, as in `said = yield 'Hello'`"
            raise SettingError(field, f"{config.name} is not a generator function", fix)
        self._parameters = inspect.signature(found).parameters
        check_options(options, self._parameters, field, self._name, OFFERED)
        self._script, self._options = found, options
        self.tools: list[ToolSpec] = []
        """The tools of `rollout.user.options.tools`."""

    @property
    def needed(self) -> dict[str, str]:
        """The row fields that the script needs -> its name."""
        needs = (p for p in self._parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        return {p.name: self._name for p in needs if p.name not in OFFERED and p.name not in self._options}

    def takes(self, field: str) -> bool:
        return field in self._parameters or takes_row(self._parameters)

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        """Raise SettingError if a row of `section` lacks a field that the script needs, or the script's `check`
        refuses it with a ValueError."""
        check = getattr(self._script, "check", None)
        for number, task in enumerate(tasks, 1):
            if missing := [name for name in self.needed if name not in task]:
                problem = f"{self._name} needs {', '.join(missing)}, which row {number} of {section} lacks"
                fix = f"rename a field by {section}.columns, or set it in rollout.user.options"
                raise SettingError("rollout.user", f"{problem} ({', '.join(task)})", fix)
            try:
                if check is not None:
                    check(own_copy(task))
            except ValueError as error:
                fix = "correct the row, or rollout.user.options"
                raise SettingError(
                    "rollout.user", f"{self._name} {error}, in row {number} of {section}", fix
                ) from error

    def begin(self, episode: Episode, session: ToolSession, runner: Any) -> "ScriptedUser":
        """Start the script for a chain."""

        async def call(name: str, /, **arguments: Any) -> str:
            episode.counts["user/calls"] += 1
            made = ToolCall(f"user_{episode.counts['user/calls']}", name, arguments)
            return text_of((await session.call(made, by_user=True)).content)

        metrics = defaultdict[str, float](float)
        offered = {"call": call, "metrics": metrics, "policy": policy_of(runner, episode), "tools": self.tools}
        given = {**own_copy(episode.task), **self._options, **offered}
        takes_all = takes_row(self._parameters)
        names = {name for name in given if name in self._parameters or (takes_all and name not in OFFERED)}
        script = self._script(**{name: given[name] for name in names})
        return ScriptedUser(self.config, episode, script, self._is_async, metrics)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (close := getattr(self._script, "close", None)) is not None:
            await close()


class ScriptedUser:
    """A running script; see User."""

    def __init__(
        self, config: UserConfig, episode: Episode, script: Any, is_async: bool, metrics: dict[str, float]
    ) -> None:
        self._config = config
        self._episode = episode
        self._script = script
        self._is_async = is_async
        self._metrics = metrics
        self._seconds = 0.0
        episode.own_metrics = self.metrics

    def metrics(self) -> dict[str, float]:
        """Return the user's numbers: turns, calls, seconds, and those that the script counts."""
        counts = self._episode.counts
        counted = {name: value for name, value in self._metrics.items() if is_finite_number(value)}
        own = {name: counts[f"user/{name}"] for name in ("turns", "calls")}
        return {f"user/{name}": float(n) for name, n in {**counted, **own, "seconds": self._seconds}.items()}

    async def speak(self, said: str | None) -> tuple[list[Message], bool]:
        episode, began = self._episode, time.monotonic()
        with episode.timeline.measure(Activity.USER, episode.trajectory.turns):
            found = await self._step(said)
        self._seconds += time.monotonic() - began
        if wrong := [name for name, value in self._metrics.items() if not is_finite_number(value)]:
            raise UserError(f"{self._config.name} set the metric {wrong[0]!r} to {self._metrics[wrong[0]]!r:.100}")
        text, over = (found.value, True) if isinstance(found, Finish) else (found, False)
        if text is None and (over or said is None):
            return [], over
        if not isinstance(text, str) or not text.strip() or len(text) > MOST_CHARACTERS:
            raise UserError(
                f"{self._config.name} yielded {text!r:.200}, not a text of 1 to {MOST_CHARACTERS:,} characters"
            )
        if said is None and episode.trajectory.messages and episode.trajectory.messages[-1]["role"] == "user":
            problem = "begins, but the row or the environment has a user's message already"
            raise UserError(f"{self._config.name} {problem}; begin the script with `said = yield`, or leave that out")
        episode.counts["user/turns"] += 1
        # a lone surrogate can be neither encoded nor saved
        return [{"role": "user", "content": text.encode("utf-8", "replace").decode(), SPEAKER: "simulated"}], over

    async def _step(self, said: str | None) -> Any:
        """Run the script until it yields; its end becomes a Finish."""
        name, seconds = self._config.name, self._config.seconds
        try:
            async with asyncio.timeout(seconds) as timer:
                if self._is_async:
                    return await run_on_loop(self._script.asend(said))
                return await run_in_thread(partial(_send, self._script, said))
        except StopAsyncIteration:
            return Finish(None)
        except (UserError, ToolInfrastructureError, ServerUnreachableError):
            raise
        except Exception as error:  # boundary: user code
            if timer.expired():
                raise UserError(f"{name} took longer than {seconds:g} s") from None
            raise UserError(f"{name} raised {type(error).__name__}: {error}") from error

    async def leave(self) -> None:
        close = self._script.aclose() if self._is_async else run_in_thread(self._script.close)
        try:
            async with asyncio.timeout(self._config.seconds):
                await close
        except Exception:  # boundary: user code. A generator that still runs in a thread cannot be closed
            return


def _send(script: Any, said: str | None) -> Any:
    try:
        return script.send(said)
    except StopIteration as ended:
        return Finish(ended.value)
