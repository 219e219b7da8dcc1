"""An MCP server for our tools and Environments; the same object serves in process, over stdio and over HTTP."""

import inspect
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import mcp_types
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import MCPServer

from agentfactory.base.config import PoolConfig
from agentfactory.base.errors import short
from agentfactory.base.messages import CallError, EnvironmentReward, ToolInfrastructureError, ToolSpec
from agentfactory.base.processes.threads import run_in_thread, run_on_loop
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.watch import loop_watched
from agentfactory.tools.calls.mcp_results import failure, result_of
from agentfactory.tools.calls.truncation import cut_bytes, size_of
from agentfactory.tools.environments.environment import (
    ANCHOR_KEY,
    Environment,
    anchor_text,
    is_environment,
    overrides,
    reset_schema,
    reward_schema,
)
from agentfactory.tools.environments.environment_host import ANCHOR, EnvironmentHost, Held, NoState, is_async
from agentfactory.tools.tool import Finish, InvalidArguments, ToolFunction, is_tool

logger = logging.getLogger(__name__)

CHAIN_KEY = "agentfactory/chain"
"""Key in a call's `_meta`: the chain whose state the call uses."""
SECONDS_KEY = "agentfactory/seconds"
"""Key in the `_meta` of a call of `reset`: the time limit of reset() itself, in seconds."""
NOT_FOR_MODELS = "agentfactory/not_for_models"
"""Key in the data of an error that ends the chain: no model caused it, and none may read it."""
ROLE_KEY = "agentfactory/role"
"""Key in a listed tool's `_meta`: `tool`, or the role of an environment's hidden tool. A server that lists roles checks
arguments itself, and returns ERROR_KEY of `calls.mcp_results`."""


def build_server(
    objects: Sequence[Any],
    name: str = "agentfactory",
    pool: PoolConfig | None = None,
    options: dict[str, Any] | None = None,
    idle_seconds: float | None = None,
    result_bytes: int | None = None,
) -> Server[Any] | MCPServer:
    """Create one MCP server from `@tool` functions and bound methods, and at most one Environment class, with its pool
    and constructor `options`; an MCP server object is returned unchanged. After `idle_seconds` a chain counts as gone;
    results are cut to `result_bytes`. Raises TypeError for anything else."""
    own: OwnServer | None = None
    if len(objects) != 1 or not isinstance(objects[0], (Server, MCPServer)):
        own = OwnServer(name, objects, pool or PoolConfig(), options or {}, idle_seconds, result_bytes)
    if own is None or own.host is None:
        for field, value in (("pool", pool not in (None, PoolConfig())), ("options", options)):
            if value:
                problem = f"only an Environment class takes {field}, and server {name} has none"
                raise TypeError(f"{field}: {problem}; remove it")
    return objects[0] if own is None else own


class OwnServer(Server[Any]):
    """An MCP server of our tools. Calls from this process bypass the protocol, which takes 0.2 ms of CPU."""

    def __init__(
        self,
        name: str,
        objects: Sequence[Any],
        pool: PoolConfig,
        options: dict[str, Any],
        idle_seconds: float | None,
        result_bytes: int | None,
    ) -> None:
        super().__init__(name, on_list_tools=self._list_tools, on_call_tool=self._call_tool, lifespan=self._open)
        self.middleware.clear()  # removes tracing spans, a third of a call's cost, which nothing exports
        self.host: EnvironmentHost | None = None
        self._most = result_bytes
        self._functions: dict[str, ToolFunction] = {}
        self._methods: dict[str, tuple[str, ToolFunction]] = {}
        self._further: set[str] = set()
        self._listing: dict[str, mcp_types.Tool] = {}
        environments = [given.__name__ for given in objects if is_environment(given)]
        if len(environments) > 1:
            fix = "name one, and serve each by a server of its own"
            raise TypeError(f"server {name}: {' and '.join(environments)} are Environments; {fix}")
        for given in objects:
            if is_tool(given):
                if next(iter(inspect.signature(given).parameters), None) == "self":
                    fix = f"serve an instance's method, as in `instance.{given.spec.name}`"
                    raise TypeError(f"{given.spec.name} is a method of a class: {fix}")
                self._functions[given.spec.name] = given
                self._list(given.spec, "tool")
            elif is_environment(given):
                self.host = EnvironmentHost(given, name, pool, options, idle_seconds)
                self._list_environment(given, options)
            else:
                problem = f"{given!r} is neither a @tool function or method nor an Environment class"
                raise TypeError(f"server {name}: {problem} (an MCP server object is served alone)")

    def _list_environment(self, environment: type[Environment], options: dict[str, Any]) -> None:
        attributes = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
        if is_async(environment.anchor):
            raise TypeError(f"{environment.__name__}.anchor is async; make it a plain method, which must not block")
        for attribute in attributes:
            method = getattr(environment, attribute)
            if not is_tool(method):
                continue
            if method.spec.name in _HIDDEN or attribute == "anchor":
                raise TypeError(f"{environment.__name__}.{method.spec.name} is not for the model: take @tool off it")
            self._methods[method.spec.name] = (attribute, method)
            self._list(method.spec, "tool")
        for spec in environment.further_tools(**options):
            self._further.add(spec.name)
            self._list(spec, "tool")
        self._list(ToolSpec("reset", "Begins a chain's task.", reset_schema(environment)), "reset")
        if overrides(environment, "reward"):
            self._list(ToolSpec("reward", "Judges the finished chain.", reward_schema(environment)), "reward")
        self._list(ToolSpec("close", "Lets go of the chain's state.", _NO_ARGUMENTS), "close")
        self._list(ToolSpec("gauges", "Counts the instances.", _NO_ARGUMENTS), "gauges")
        if overrides(environment, "take_images"):
            self._list(ToolSpec("take_images", "Takes what other tools have shown.", _IMAGES), "take_images")

    def _list(self, spec: ToolSpec, role: str) -> None:
        if spec.name in self._listing:
            raise TypeError(f"server {self.name}: two tools are called {spec.name}; rename one")
        self._listing[spec.name] = mcp_types.Tool(
            name=spec.name, description=spec.description, input_schema=spec.parameters, _meta={ROLE_KEY: role}
        )

    @asynccontextmanager
    async def _open(self, server: Server[Any]) -> AsyncIterator[None]:
        with loop_watched(partial(notify, logger)):
            async with nullcontext() if self.host is None else self.host.open():
                yield

    async def _list_tools(
        self, context: ServerRequestContext[Any], params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=list(self._listing.values()))

    async def _call_tool(
        self, context: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        meta = context.meta or {}
        seconds = meta.get(SECONDS_KEY)
        limit = float(seconds) if isinstance(seconds, (int, float)) else None
        return await self.call(params.name, params.arguments or {}, meta.get(CHAIN_KEY), limit)

    async def call(
        self, tool: str, arguments: dict[str, Any], chain: Any, reset_seconds: float | None = None
    ) -> mcp_types.CallToolResult:
        """Return the result of a call, with a copy of the arguments; `chain` is its key. Raises MCPError."""
        if tool not in self._listing:
            raise MCPError(mcp_types.INVALID_PARAMS, f"server {self.name} has no tool {tool}")
        try:
            return await self._call(tool, deepcopy(arguments), chain, reset_seconds)
        except InvalidArguments as error:
            return failure(CallError.INVALID_ARGUMENTS, str(error))
        except MCPError:
            raise
        except NoState as error:
            raise MCPError(mcp_types.INVALID_REQUEST, str(error), {NOT_FOR_MODELS: True}) from None
        except ToolInfrastructureError as error:  # also from a user's tool, to hide the error from the model
            raise MCPError(mcp_types.INTERNAL_ERROR, self._cut("", str(error)), {NOT_FOR_MODELS: True}) from None
        except Exception as error:  # boundary: a user's tool may raise anything, and the model reads it
            logger.debug("%s raised", tool, exc_info=error)
            text = self._cut(f"{type(error).__name__}: ", str(error))
            error.__traceback__ = None  # part of a cycle that would keep the error, and its text, until a collection
            return failure(CallError.TOOL_ERROR, text)

    async def _call(
        self, name: str, arguments: dict[str, Any], chain: Any, reset_seconds: float | None
    ) -> mcp_types.CallToolResult:
        if function := self._functions.get(name):
            parsed = function.parse_arguments(arguments)
            if is_async(function):
                return self._result(await run_on_loop(function(**parsed)))
            return await run_in_thread(lambda: self._result(function(**parsed)))

        assert self.host is not None  # every other listed tool belongs to the environment
        if name == "gauges":
            # in a thread, because the class's gauges() may block
            return _structured(await run_in_thread(self.host.gauges))
        if not isinstance(chain, str):
            raise MCPError(mcp_types.INVALID_REQUEST, f"{name} acts on a chain's state: _meta needs {CHAIN_KEY!r}")
        if name == "reset":
            return await self.host.reset(chain, arguments, self._opening, reset_seconds)
        if name == "reward":
            parse = EnvironmentReward.parse
            return await self.host.call(
                chain, name, arguments, lambda value, _: _structured(parse(value, "reward()").to_json())
            )
        if name == "take_images":
            return await self.host.call(chain, name, arguments, lambda told, _: _structured({"told": told}))
        if name == "close":
            await self.host.release(chain)
            return mcp_types.CallToolResult(content=[])
        if name in self._further:
            given = {"name": name, "arguments": arguments}
            return await self.host.call(chain, "call_tool", given, self._observed)
        attribute, method = self._methods[name]
        return await self.host.call(chain, attribute, method.parse_arguments(arguments), self._observed)

    def _result(self, value: Any) -> mcp_types.CallToolResult:
        return result_of(value, self._most)

    def _opening(self, value: Any, held: Held) -> mcp_types.CallToolResult:
        if isinstance(value, Finish):
            raise TypeError("reset() returned finish(...), but it only begins the chain")
        return self._observed(value, held)

    def _observed(self, value: Any, held: Held) -> mcp_types.CallToolResult:
        result = self._result(value)
        if not overrides(type(held.environment), "anchor"):
            return result
        name = f"{type(held.environment).__name__}.anchor()"
        held.running = ANCHOR
        try:
            given = held.environment.anchor()
        except Exception as error:
            raise ToolInfrastructureError(f"{name} raised {type(error).__name__}: {error}; fix: correct it") from error
        try:
            anchor = anchor_text(given)
        except Exception as error:
            told = f"{name} returned {short(given)}: {error}"
            raise ToolInfrastructureError(f"{told}; fix: return text, numbers, or lists or dicts of them") from error
        result.meta = {**(result.meta or {}), ANCHOR_KEY: False if anchor is None else anchor}
        return result

    def _cut(self, name: str, text: str) -> str:
        if self._most is not None:
            text = cut_bytes(text, max(1, self._most - size_of(name))) or text
        return name + text


_HIDDEN = ("reset", "reward", "close", "gauges", "take_images")


def _structured(answer: dict[str, Any]) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(
        content=[mcp_types.TextContent(type="text", text=json.dumps(answer))], structured_content=answer
    )


_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_IMAGES = {
    **_NO_ARGUMENTS,
    "properties": {"images": {"type": "array", "items": {"type": "string"}}},
    "required": ["images"],
}
