"""Our tools and Environments as an MCP server: in process, over stdio or over HTTP it is the same object."""

import asyncio
import contextvars
import inspect
import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from tools.environment import Environment
from tools.messages import CallError, EnvironmentReward, ToolSpec
from tools.tool import InvalidArguments, ToolFunction, is_tool

logger = logging.getLogger(__name__)

CHAIN_KEY = "agentfactory/chain"
"""Key of a call's `_meta`: the chain whose state the call acts on."""
ROLE_KEY = "agentfactory/role"
"""Key of a listed tool's `_meta`: `tool`, or `reset`, `reward`, `close` of an environment, which no model may see.
A server that gives roles checks arguments itself and gives `ERROR_KEY`."""
ERROR_KEY = "agentfactory/error"
"""Key of a failed result's `_meta`: the CallError."""


def build_server(objects: Sequence[Any], name: str = "agentfactory") -> Server[Any] | MCPServer:
    """Make one MCP server of `@tool` functions and at most one Environment class.

    A single MCP server object of the SDK is returned as it is.

    Raises:
        TypeError: an object of another kind, two Environments, or two tools of one name.
    """
    if len(objects) == 1 and isinstance(objects[0], (Server, MCPServer)):
        return objects[0]
    host = _ToolHost(name, objects)
    server: Server[Any] = Server(name, on_list_tools=host.list_tools, on_call_tool=host.call_tool)
    server.middleware.clear()  # tracing spans, a third of a call's cost, and nobody exports them
    return server


@dataclass
class _Instance:
    """A chain's environment; the lock keeps its calls from overlapping, also with one that its caller gave up."""

    environment: Environment
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, method: Callable[..., Any], **arguments: Any) -> Any:
        await self.lock.acquire()
        if inspect.iscoroutinefunction(method):
            try:
                return await method(**arguments)
            finally:
                self.lock.release()
        result = _run_in_thread(partial(method, **arguments))
        result.add_done_callback(self._release)
        # cancelling the call does not stop the thread: the lock stays taken until the method has returned
        return await asyncio.shield(result)

    def _release(self, result: "asyncio.Future[Any]") -> None:
        self.lock.release()
        if not result.cancelled():
            result.exception()  # retrieved, so that asyncio does not report the fault of an abandoned call


class _ToolHost:
    """The handlers of one server, and its chains' environments."""

    def __init__(self, name: str, objects: Sequence[Any]) -> None:
        self._name = name
        self._functions: dict[str, ToolFunction] = {}
        self._methods: dict[str, ToolFunction] = {}
        self._environment: type[Environment] | None = None
        self._instances: dict[str, _Instance] = {}
        self._listing: list[Tool] = []
        for given in objects:
            if is_tool(given):
                self._functions[given.spec.name] = given
                self._list(given.spec, "tool")
            elif isinstance(given, type) and issubclass(given, Environment):
                self._add_environment(given)
            else:
                raise TypeError(
                    f"server {name}: {given!r} is neither a @tool function nor an Environment class"
                    " (an MCP server object is served alone)"
                )

    def _add_environment(self, environment: type[Environment]) -> None:
        label = environment.__name__
        if self._environment is not None:
            raise TypeError(
                f"server {self._name}: {self._environment.__name__} and {label} are both Environments; "
                "serve each by a server of its own"
            )
        if any(
            parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in inspect.signature(environment).parameters.values()
        ):
            raise TypeError(f"{label}: an Environment is made without arguments; take the task's fields in reset()")
        attributes = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
        for method in filter(is_tool, (getattr(environment, attribute) for attribute in attributes)):
            if method.spec.name in ("reset", "reward", "close"):
                raise TypeError(f"{label}.{method.spec.name} is not for the model: take @tool off it")
            self._methods[method.spec.name] = method
            self._list(method.spec, "tool")
        self._list(ToolSpec("reset", "Begins a chain's task.", _reset_schema(environment)), "reset")
        self._list(ToolSpec("reward", "Judges the finished chain.", _NO_ARGUMENTS), "reward")
        self._list(ToolSpec("close", "Lets go of the chain's state.", _NO_ARGUMENTS), "close")
        self._environment = environment

    def _list(self, spec: ToolSpec, role: str) -> None:
        if any(listed.name == spec.name for listed in self._listing):
            raise TypeError(f"server {self._name}: two tools are called {spec.name}")
        self._listing.append(
            Tool(name=spec.name, description=spec.description, input_schema=spec.parameters, _meta={ROLE_KEY: role})
        )

    async def list_tools(
        self, context: ServerRequestContext[Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=self._listing)

    async def call_tool(self, context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        arguments = params.arguments or {}
        if function := self._functions.get(params.name):
            return await self._call(function, arguments, partial(_run, function))
        if self._environment is None or (
            params.name not in self._methods and params.name not in ("reset", "reward", "close")
        ):
            raise MCPError(INVALID_PARAMS, f"server {self._name} has no tool {params.name}")

        chain = (context.meta or {}).get(CHAIN_KEY)
        if not isinstance(chain, str):
            raise MCPError(INVALID_REQUEST, f"{params.name} acts on a chain's state: _meta needs {CHAIN_KEY!r}")
        if params.name == "reset":
            return await self._reset(chain, self._environment, arguments)
        if params.name == "close":
            return await self._close(chain)
        instance = self._instances.get(chain)
        if instance is None:
            raise MCPError(INVALID_REQUEST, f"server {self._name} holds no state of this chain: reset was not called")
        if params.name == "reward":
            return await self._reward(instance)
        method = self._methods[params.name]
        return await self._call(method, arguments, partial(instance.run, MethodType(method, instance.environment)))

    async def _call(self, tool: ToolFunction, arguments: dict[str, Any], run: Callable[..., Any]) -> CallToolResult:
        try:
            parsed = tool.parse_arguments(arguments)
        except InvalidArguments as error:
            return _failure(CallError.INVALID_ARGUMENTS, str(error))
        try:
            return _text_result(_to_text(await run(**parsed)))
        except Exception as error:  # boundary: a user's tool may raise anything, and the model is told
            return _raised(tool.spec.name, error)

    async def _reset(self, chain: str, environment: type[Environment], task: dict[str, Any]) -> CallToolResult:
        await self._close(chain)
        try:
            # kept from here on, so that close() reaches it also when reset() fails
            instance = self._instances[chain] = _Instance(environment())
            opening = await instance.run(instance.environment.reset, **task)
            if opening is not None and not isinstance(opening, str):
                raise TypeError(f"{environment.__name__}.reset returned {opening!r}; it returns a text or None")
        except Exception as error:  # boundary: user code
            return _raised("reset", error)
        return _text_result(opening) if opening is not None else CallToolResult(content=[])

    async def _reward(self, instance: _Instance) -> CallToolResult:
        try:
            verdict = EnvironmentReward.parse(await instance.run(instance.environment.reward), "reward()").to_json()
        except Exception as error:  # boundary: user code
            return _raised("reward", error)
        text = TextContent(type="text", text=json.dumps(verdict))
        return CallToolResult(content=[text], structured_content=verdict)

    async def _close(self, chain: str) -> CallToolResult:
        instance = self._instances.pop(chain, None)
        if instance is not None:
            try:
                await instance.run(instance.environment.close)
            except Exception as error:  # boundary: user code
                return _raised("close", error)
        return CallToolResult(content=[])


_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def _reset_schema(environment: type[Environment]) -> dict[str, Any]:
    """Names of the task fields that reset() takes; any JSON value goes, because rows hold any."""
    parameters = list(inspect.signature(environment.reset).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "type": "object",
        "properties": {p.name: {} for p in named},
        "required": [p.name for p in named if p.default is p.empty],
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


async def _run(function: Callable[..., Any], **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await _run_in_thread(partial(function, **arguments))


def _run_in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run `function` in a daemon thread; costs about 0.05 ms."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def job() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = context.run(function)
        except BaseException as raised:
            # a future carries no StopIteration, and a tool's SystemExit must not end the process
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = cast(Exception, raised) if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    _jobs.put(job)
    if not _idle_threads.acquire(blocking=False):
        threading.Thread(target=_work, name="tool", daemon=True).start()
    return future


# Not a ThreadPoolExecutor: tools that never return would fill it, and it would wait for them when the process ends.
_jobs: "queue.SimpleQueue[Callable[[], None]]" = queue.SimpleQueue()
_idle_threads = threading.Semaphore(0)


def _work() -> None:
    while True:
        _jobs.get()()
        _idle_threads.release()


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (bool, int, float, dict, list)):
        return json.dumps(value, ensure_ascii=False)
    raise TypeError(f"a tool returns text, a number, a bool, None, or JSON of these, not {type(value).__name__}")


def _text_result(text: str) -> CallToolResult:
    # lone surrogates cannot be sent over a pipe or a socket; replaced here, so that every transport says the same
    text = text.encode("utf-8", "replace").decode("utf-8")
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _failure(kind: CallError, text: str) -> CallToolResult:
    result = _text_result(text)
    result.is_error = True
    result.meta = {ERROR_KEY: kind.value}
    return result


def _raised(tool: str, error: Exception) -> CallToolResult:
    logger.debug("%s raised", tool, exc_info=error)
    return _failure(CallError.TOOL_ERROR, f"{type(error).__name__}: {error}")
