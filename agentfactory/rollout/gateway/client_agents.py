"""Agents with their own loop: their interface, the inputs for a chain, and functions as agents."""

import asyncio
import inspect
import json
import logging
import traceback
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Content, EnvironmentReward, ToolCall, ToolInfrastructureError, ToolResult
from agentfactory.base.processes.threads import run_on_loop
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.gateway_server import Endpoint, Gateway
from agentfactory.rollout.trajectory import StopReason
from agentfactory.tools.sandbox.program import Listening
from agentfactory.tools.sessions.tool_session import ToolSession

logger = logging.getLogger(__name__)


class ChainEnded(Exception):
    """A tool call by an agent whose chain has ended."""


class ChainTools:
    """The recipe's tools for one chain, whose calls count toward its limits; `definitions` is in OpenAI's format."""

    def __init__(self, episode: Episode, session: ToolSession, end: Callable[[StopReason | Exception], None]) -> None:
        """`end` gets what ends the chain: the reason of a result, or an error."""
        self.definitions = [spec.to_openai() for spec in episode.setup.specs]
        self.opening = session.opening
        """The environment's opening text; None if it has none."""
        self._episode = episode
        self._session = session
        self._end = end
        self._numbers = count()
        self._running: set[asyncio.Task[ToolResult]] = set()
        self._closed = False

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> Content:
        """Run a call, and return the content for the model: text, or parts with images. Errors of tools are results
        too. `arguments` may be JSON text. Raise ChainEnded if the chain has ended."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}", strict=False)
            except (ValueError, RecursionError) as error:
                return f"The arguments of {name} are not JSON: {error}"
            if not isinstance(arguments, dict):
                return f"The arguments of {name} are not a JSON object."
        if self._closed:
            raise ChainEnded("the chain has ended")
        call = ToolCall(f"call_{next(self._numbers)}", name, dict(arguments))
        running = asyncio.ensure_future(self._result(call))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
        if running.cancelled():
            raise ChainEnded("the chain has ended while the tool was running")
        try:
            result = running.result()
        except ToolInfrastructureError as error:
            self._end(error)  # the chain is lost even if the agent catches the error
            raise
        if (reason := self._episode.note_results([call], [result])) is not None:
            self._end(reason)
        return result.content

    async def _result(self, call: ToolCall) -> ToolResult:
        make = self._episode.timeline.calls(self._session.call, None)
        (result,) = await self._session.number_images([call], await self._episode.limits.run([call], make))
        return result

    async def close(self) -> None:
        """Cancel running calls, and refuse new ones: an agent may outlive its chain, and its environment."""
        self._closed = True
        for running in self._running:
            running.cancel()
        if self._running:
            await asyncio.wait(self._running)


@dataclass(frozen=True)
class Visit:
    """The inputs of an agent for one chain. `workspace` is the chain's folder, if it has one. `report` accepts the
    agent's own reward; `judged` is true if the recipe scores the chain without it. `listening` serves the endpoint on
    an additional socket."""

    endpoint: Endpoint
    task: Task
    chain: str
    tools: ChainTools
    workspace: Path | None
    report: Callable[[EnvironmentReward], None]
    judged: bool
    max_turns: int
    listening: Listening | None = None


class ClientAgent(AbstractAsyncContextManager["ClientAgent"]):
    """An agent that samples its turns through an endpoint, used as an async context manager."""

    elsewhere = False
    """True for an external program, without this machine's files, whose report a chain without turns left awaits."""
    address_fix = ""
    """The fix if the agent's client does not reach the model."""

    async def __aexit__(self, *_: object) -> None:
        return None

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        """Raise SettingError if a row of `section` lacks a field that the agent needs."""
        return None

    def gateway(self) -> Gateway:
        return Gateway()

    @asynccontextmanager
    async def begun(self, chain: str) -> AsyncIterator[None]:
        """Wait until a chain may start, which starts its time limit."""
        yield

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path | None]:
        """Create the folder of a chain, and delete it on exit. Yield None if the agent has no folders."""
        yield None

    @abstractmethod
    async def run(self, visit: Visit) -> str | None:
        """Run one chain. Return its answer, or None for the model's last message. Raise AgentFailed if it fails."""


INPUTS = ("client", "anthropic", "endpoint", "task", "tools", "chain")
"""Parameters of an agent function, two of which are clients of the SDKs."""


class FunctionAgent(ClientAgent):
    """A user's async function, called once for each chain."""

    address_fix = (
        "request turns with the client that the function takes (`client` or `anthropic`), or give your own client "
        "base_url=endpoint.url and api_key=endpoint.key, not an address of its own"
    )

    def __init__(self, reference: str, function: Callable[..., Any]) -> None:
        """Raise SettingError if a parameter is unknown and has no default, or its client is not installed."""
        self._name = reference.rpartition(":")[2]
        self._function = function
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            if name not in INPUTS and parameter.default is parameter.empty:
                problem = f"{reference} has an unknown parameter {name!r} without a default"
                raise SettingError("rollout.agent", problem, f"use {', '.join(INPUTS)}; `task` has the row's fields")
        self._takes = [name for name in INPUTS if name in parameters]
        self._kinds = {name: _client(name, reference) for name in ("client", "anthropic") if name in parameters}
        self._clients: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        for library in ("httpx", "httpx2"):
            logging.getLogger(library).setLevel(logging.WARNING)  # these log a line per request
        # asyncio's default executor has four threads more than cores: too few for agents that block
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4096, "agent"))
        # one HTTP client for all chains, since creating one takes 20 ms; no retries, which would sample a turn twice
        self._clients = {
            # the gateway is on this machine
            name: kind(
                base_url="http://127.0.0.1",
                api_key="none",
                max_retries=0,
                timeout=None,
                http_client=http_client(trust_env=False, timeout=None),
            )
            for name, (kind, http_client) in self._kinds.items()
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    async def run(self, visit: Visit) -> str | None:
        urls = {"client": visit.endpoint.url, "anthropic": visit.endpoint.anthropic_url}
        inputs = dict(vars(visit))
        for name, client in self._clients.items():
            inputs[name] = client.with_options(base_url=urls[name], api_key=visit.endpoint.key)
        try:
            answer = await run_on_loop(self._function(**{name: inputs[name] for name in self._takes}))
        except ToolInfrastructureError:
            raise
        except Exception as error:  # boundary: user code
            logger.info("the agent failed in chain %s", visit.chain, exc_info=error)
            frames = traceback.extract_tb(error.__traceback__)
            users = [frame for frame in frames if "site-packages" not in frame.filename]
            place = f" ({Path(users[-1].filename).name}, line {users[-1].lineno})" if users else ""
            raise AgentFailed(f"{self._name}: {type(error).__name__}: {error}{place}") from error
        if answer is not None and not isinstance(answer, str):
            raise AgentFailed(f"{self._name} returned {answer!r:.200}; return the answer as a string, or None")
        return answer


def _client(name: str, reference: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    library, kind = {"client": ("openai", "AsyncOpenAI"), "anthropic": ("anthropic", "AsyncAnthropic")}[name]
    try:
        module = __import__(library)
    except ImportError:
        problem = f"{reference} takes {name!r}, but the library {library} is not installed"
        raise SettingError("rollout.agent", problem, f"pip install {library}") from None
    return getattr(module, kind), module.DefaultAsyncHttpxClient
