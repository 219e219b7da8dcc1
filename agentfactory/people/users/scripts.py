"""The scripts of simulated users: generators that yield the user's messages and get the agent's answers."""

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import (
    EnvironmentReward,
    Message,
    ToolCall,
    ToolInfrastructureError,
    own_copy,
    text_of,
)
from agentfactory.base.processes.threads import call_within, run_in_thread, run_on_loop
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.loading import load_for
from agentfactory.base.user_code.options import check_options, instantiate, takes_row
from agentfactory.people.users.model_user import policy_of
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.simulated_user import SPEAKER, UserError
from agentfactory.rollout.config import UserConfig
from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.rewards.reward_spec import run
from agentfactory.rollout.trajectory import Activity
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.tool import Finish

logger = logging.getLogger(__name__)

PREBUILT = {"model": "agentfactory.people.users.model_user:ModelUser"}
OFFERED = ("call", "metrics", "policy", "tools")
"""The parameters of a script that the chain fills."""
MOST_CHARACTERS = 1 << 16
"""Maximum length of a user's message."""
CLOSE_SECONDS = 10.0


class Scripts(AbstractAsyncContextManager["Scripts"]):
    """The script of `rollout.user`, which each chain runs for itself; it is closed on exit. Raise SettingError if it
    cannot be used."""

    def __init__(self, config: UserConfig, base: Path = Path()) -> None:
        self.config = config
        field, self._name, options = "rollout.user", config.name.rpartition(":")[2], dict(config.options)
        if options.pop("tools", []) and config.name == "model" and options.get("url") is None:
            raise SettingError(f"{field}.options.tools", "the trained model calls none as a user", "set url and model")
        found: Any = load_for(field, config.name, base, PREBUILT)
        if inspect.isclass(found):
            found, options = instantiate(found, options, field, self._name, OFFERED), {}
        function = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004
        is_async = inspect.isasyncgenfunction(function)
        if not is_async and not inspect.isgeneratorfunction(function):
            fix = "yield the user's messages, as in `said = yield 'Hello'`"
            raise SettingError(field, f"{config.name} is not a generator function", fix)
        self._parameters = inspect.signature(found).parameters
        check_options(options, self._parameters, field, self._name, OFFERED)
        if "call" in self._parameters and not is_async:
            raise SettingError(field, f"{config.name} takes `call`, but is not async", "write it with `async def`")
        self._script, self._options = found, options

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
                    call_within(partial(check, own_copy(task)), UserConfig.seconds)
            except Exception as error:  # boundary: user code
                problem = "" if isinstance(error, ValueError) else f"check raised {type(error).__name__}: "
                problem = f"{self._name} {problem}{error}, in row {number} of {section}"
                raise SettingError("rollout.user", problem, "correct the row, or rollout.user.options") from error

    def begin(self, episode: Episode, runner: Any, session: ToolSession) -> "ScriptedUser":
        """Start the script for a chain."""

        async def call(name: str, /, **arguments: Any) -> str:
            episode.counts["user/calls"] += 1
            made = ToolCall(f"user_{episode.counts['user/calls']}", name, arguments)
            return text_of((await session.call(made, by_user=True)).content)

        metrics = defaultdict[str, float](float)
        offered = {"call": call, "metrics": metrics, "policy": policy_of(runner, episode), "tools": runner.user_tools}
        given = {**own_copy({**episode.task, **self._options}), **offered}
        takes_all = takes_row(self._parameters)
        names = {name for name in given if name in self._parameters or (takes_all and name not in OFFERED)}
        script = self._script(**{name: given[name] for name in names})
        return ScriptedUser(self.config.name, episode, script, metrics)

    async def __aexit__(self, *exception: object) -> None:
        if (close := getattr(self._script, "close", None)) is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await run(close)
            except Exception as error:  # boundary: user code
                notify(logger, f"close of {self._name}", f"{self._name} could not be closed: {error!r}")


class ScriptedUser:
    """A running script; see User."""

    def __init__(self, name: str, episode: Episode, script: Any, metrics: dict[str, float]) -> None:
        self._name, self._episode, self._script, self._metrics = name, episode, script, metrics
        self._is_async = inspect.isasyncgen(script)
        self._seconds = 0.0
        self._asked = asyncio.Queue[tuple[str | None, asyncio.Future[Any]]]()
        self._driver = asyncio.create_task(self._drive(), name=f"user of {episode.trajectory.id}")
        episode.own_metrics = self.metrics

    def metrics(self) -> dict[str, float]:
        """Return the user's numbers: turns, calls, seconds, and those that the script counts."""
        own = {name: float(self._episode.counts[f"user/{name}"]) for name in ("turns", "calls")}
        with suppress(TypeError):  # the chain ended as user_error
            own = self._counted() | own
        return {f"user/{name}": number for name, number in {**own, "seconds": self._seconds}.items()}

    def _counted(self) -> dict[str, float]:
        return EnvironmentReward.parse({**self._metrics, "reward": 0.0}, self._name).metrics

    async def speak(self, said: str | None) -> tuple[list[Message], bool]:
        episode, began = self._episode, time.monotonic()
        reply = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((said, reply))
        with episode.timeline.measure(Activity.USER, episode.trajectory.turns):
            await asyncio.wait([reply], timeout=UserConfig.seconds)
        self._seconds += time.monotonic() - began
        if not reply.done():
            raise UserError(f"{self._name} took longer than {UserConfig.seconds:g} s")
        found = reply.result()
        try:
            self._counted()
        except TypeError as error:
            raise UserError(str(error)) from error
        text, over = (found.value, True) if isinstance(found, Finish) else (found, False)
        if over and said is None:
            raise UserError(f"{self._name} ended the conversation before it began")
        if text is None and (over or said is None):
            return [], over
        if not isinstance(text, str) or not text.strip() or len(text) > MOST_CHARACTERS:
            raise UserError(f"{self._name} yielded {text!r:.200}, not a text of 1 to {MOST_CHARACTERS:,} characters")
        if said is None and episode.trajectory.messages and episode.trajectory.messages[-1]["role"] == "user":
            problem = "begins, but the row or the environment has a user's message already"
            raise UserError(f"{self._name} {problem}; begin the script with `said = yield`, or leave that out")
        episode.counts["user/turns"] += 1
        # a lone surrogate can be neither encoded nor saved
        return [{"role": "user", "content": text.encode("utf-8", "replace").decode(), SPEAKER: "simulated"}], over

    async def _drive(self) -> None:
        """Run the script in one task, which the chain can leave behind: a script may ignore that it is cancelled."""
        try:
            while True:
                said, reply = await self._asked.get()
                try:
                    reply.set_result(await self._step(said))
                except Exception as error:
                    reply.set_exception(error)
        finally:
            await (run_on_loop(self._script.aclose()) if self._is_async else run_in_thread(self._script.close))

    async def _step(self, said: str | None) -> Any:
        """Run the script until it yields; its end becomes a Finish."""
        try:
            if self._is_async:
                return await run_on_loop(self._script.asend(said))
            return await run_in_thread(partial(_send, self._script, said))
        except StopAsyncIteration:
            return Finish(None)
        except (UserError, ToolInfrastructureError, ServerUnreachableError):
            raise
        except (Exception, GeneratorExit) as error:  # boundary: user code
            raise UserError(f"{self._name} raised {type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        self._driver.cancel()
        await asyncio.wait([self._driver], timeout=CLOSE_SECONDS)
        if not self._driver.cancelled():
            problem = repr(self._driver.exception()) if self._driver.done() else f"not within {CLOSE_SECONDS:g} s"
            notify(logger, f"close of {self._name}", f"{self._name} could not be closed: {problem}")


def _send(script: Any, said: str | None) -> Any:
    try:
        return script.send(said)
    except StopIteration as ended:
        return Finish(ended.value)
