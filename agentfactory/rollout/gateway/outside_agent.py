"""External agents: programs that fetch tasks over HTTP, run them through the gateway, and report the result."""

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Self

from aiohttp import web

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward, ToolInfrastructureError
from agentfactory.base.run_notices import inform, notify
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.rollout.config import OutsideOptions
from agentfactory.rollout.gateway.client_agents import ChainEnded, ClientAgent, Visit
from agentfactory.rollout.gateway.gateway_server import Gateway, key_of
from agentfactory.rollout.gateway.request_options import Refusal, foreign_key, wrong

logger = logging.getLogger(__name__)

_PAGE = "docs/own-agents.md"
_FIELD = "rollout.agent.options"
POLL_SECONDS = 3.0
"""Time for which a request waits for a task, less than the usual timeouts of clients."""
PATIENCE_SECONDS = 60.0
"""Time for which a chain waits for a program before a warning."""
_REPORTED = ("reward", "answer", "error")
_LONGEST_TEXT = 1_000_000
"""Maximum number of characters of an answer or error, which is stored in the chain's trajectory."""


class _Asker(NamedTuple):
    """A request for a task. A chain that takes it sets `taken`, then `task`."""

    taken: asyncio.Event
    task: "asyncio.Future[dict[str, Any]]"


class _Taken(NamedTuple):
    """A chain that a program runs, and the program's report at its end."""

    visit: Visit
    end: "asyncio.Future[dict[str, Any]]"


class OutsideAgent(ClientAgent):
    """External programs. A chain waits until a program requests a task. The program gets the row, an address and a key,
    with which it requests turns, calls the recipe's tools, and reports the end of the chain."""

    elsewhere = True

    def __init__(self, config: OutsideOptions) -> None:
        """Create the agent. Raise SettingError if its token's environment variable is not set."""
        token = os.environ.get(OutsideOptions.token_env, "")
        if not token:
            problem = f"the variable {OutsideOptions.token_env} is not set; without it, no program can fetch tasks"
            fix = f"export {OutsideOptions.token_env}=SECRET here and where the programs run"
            raise SettingError("rollout.agent", problem, fix)
        self._token = token.encode()
        self._config = config
        self._askers: asyncio.Queue[_Asker] = asyncio.Queue()
        routes = {"/tasks": self._give, "/tools": self._call, "/reward": self._finish}
        self._gateway = _TaskGateway(config.port, [web.post(path, handle) for path, handle in routes.items()])
        self._chosen: dict[str, _Asker] = {}
        """Chain -> the request that gets its task as soon as its tools are open."""
        self._taken: dict[str, _Taken] = {}
        """Key -> the chain that a program runs with it."""

    def gateway(self) -> Gateway:
        return self._gateway

    @asynccontextmanager
    async def begun(self, chain: str) -> AsyncIterator[None]:
        """See ClientAgent: wait until a program requests a task."""
        self._chosen[chain] = await self._next_asker()
        try:
            yield
        finally:
            # the chain may have failed before its program got the task
            asker = self._chosen.pop(chain, None)
            if asker is not None and not asker.task.done():
                self._askers.put_nowait(asker)

    async def _next_asker(self) -> _Asker:
        text = f"a chain has waited {PATIENCE_SECONDS:g} s for a program to fetch its task; fix: start a program that "
        text += "sends POST /tasks to the address in the log"
        tell = partial(notify, logger, "chains that no program takes", text, see=_PAGE)
        notice = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, tell)
        try:
            while (asker := await self._askers.get()).task.done():
                pass
        finally:
            notice.cancel()
        asker.taken.set()
        return asker

    async def run(self, visit: Visit) -> str | None:
        asker = self._chosen.pop(visit.chain)
        while asker.task.done():  # the program disconnected before it got the task
            asker = await self._next_asker()
        taken = self._taken[visit.endpoint.key] = _Taken(visit, asyncio.get_running_loop().create_future())
        described = {"chain": visit.chain, "task": visit.task, "key": visit.endpoint.key, "model": visit.endpoint.model}
        asker.task.set_result({**described, "tools": visit.tools.definitions, "opening": visit.tools.opening})
        try:
            ended = await taken.end
        finally:
            del self._taken[visit.endpoint.key]
        if ended.get("error") is not None:
            raise AgentFailed(ended["error"], ended.get("answer"))
        return ended.get("answer")

    async def _give(self, request: web.Request) -> web.Response:
        if not hmac.compare_digest(key_of(request).encode(errors="surrogateescape"), self._token):
            raise Refusal(401, "invalid_token", f"the key must be the token in {OutsideOptions.token_env}")
        asker = _Asker(asyncio.Event(), asyncio.get_running_loop().create_future())
        self._askers.put_nowait(asker)
        try:
            async with asyncio.timeout(POLL_SECONDS) as limit:
                await asker.taken.wait()
                limit.reschedule(None)
                task = await asker.task
        except TimeoutError:
            return web.Response(status=204)
        finally:
            asker.task.cancel()
        # the address under which the program reaches this machine, maybe through a tunnel
        base = f"{request.scheme}://{request.host}"
        return web.json_response({**task, "url": f"{base}/v1", "anthropic_url": base})

    def _of(self, request: web.Request) -> _Taken:
        taken = self._taken.get(key_of(request))
        if taken is None or taken.end.done():
            raise foreign_key()
        return taken

    async def _hear(self, request: web.Request) -> tuple[_Taken, dict[str, Any]]:
        """As Gateway.hearing, for a chain that a program runs."""
        self._of(request)
        async with self._gateway.hearing(request) as (_, body):
            return self._of(request), body

    async def _call(self, request: web.Request) -> web.Response:
        taken, body = await self._hear(request)
        name, arguments = body.get("name"), body.get("arguments", {})
        if not isinstance(name, str):
            raise wrong(f"name: got {name!r}; use the name of a tool")
        if not isinstance(arguments, dict | str):
            raise wrong(f"arguments: got {arguments!r:.200}; use an object, or its JSON text")
        try:
            return web.json_response({"content": await taken.visit.tools.call(name, arguments)})
        except ChainEnded as error:
            raise Refusal(409, "chain_ended", str(error)) from None
        except ToolInfrastructureError as error:
            raise Refusal(503, "tool_infrastructure", str(error)) from error

    async def _finish(self, request: web.Request) -> web.Response:
        taken, body = await self._hear(request)
        reward = _read_report(body, judged=taken.visit.judged)
        if reward is not None:
            taken.visit.report(reward)
        taken.end.set_result(body)
        return web.json_response({"chain": taken.visit.chain})


class _TaskGateway(Gateway):
    """The gateway of a run with external programs; it announces its address."""

    async def __aenter__(self) -> Self:
        try:
            await super().__aenter__()
        except OSError as error:
            problem = f"got {self._port}: {error.strerror or error}"
            raise SettingError(f"{_FIELD}.port", problem, "name a free port, or 0") from error
        inform(logger, f"external programs can fetch tasks at {self.url}/tasks", see=_PAGE)
        return self


def _read_report(body: dict[str, Any], *, judged: bool) -> EnvironmentReward | None:
    for name in body:
        if name not in _REPORTED:
            raise wrong(f"{name}: unknown; use {', '.join(_REPORTED)} (metrics are in reward, which may be an object)")
    for name in ("answer", "error"):
        if not isinstance(body.get(name), str | None):
            raise wrong(f"{name}: got {body[name]!r:.200}; use a text")
        if len(body.get(name) or "") > _LONGEST_TEXT:
            raise wrong(f"{name}: has {len(body[name])} characters; use {_LONGEST_TEXT} at most")
    if body.get("reward") is None:
        if not judged and body.get("error") is None:
            raise wrong("reward: missing, but the recipe has no rewards; report a reward or an error")
        return None
    if body.get("error") is not None:
        raise wrong(f"reward: got {body['reward']!r:.200} and error, but a failed chain has no reward; remove one")
    try:
        return EnvironmentReward.parse(body["reward"], "the program")
    except TypeError as error:
        raise wrong(f"reward: {error}") from error
