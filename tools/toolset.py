"""`Toolset`: all tools of a recipe behind one interface, and the sessions of the chains that call them."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from mcp import MCPError
from mcp_types import (
    INVALID_PARAMS,
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)
from referencing import Registry

from tools.config import EnvironmentTools, McpServerConfig, ToolsRecipe
from tools.mcp_client import CallTimeout, Connection, Log, Target, remote_target
from tools.mcp_server import ERROR_KEY, ROLE_KEY, build_server
from tools.messages import (
    CallError,
    EnvironmentReward,
    EnvironmentRewardError,
    ToolCall,
    ToolInfrastructureError,
    ToolResult,
    ToolSpec,
)
from tools.user_code import load_object

logger = logging.getLogger(__name__)

_MAX_DEPTH = 64
"""Deepest arguments that are sent. The SDK drops what is nested some 200 levels deep, and the call would hang."""
_CLOSE_SECONDS = 10.0
"""How long a chain that ends waits for its environments to close."""


@asynccontextmanager
async def open_toolset(recipe: ToolsRecipe, base: Path, log: Log = lambda record: None) -> "AsyncIterator[Toolset]":
    """Open every tool and MCP server of `recipe`, all at once; close them when left.

    Args:
        base: Folder at which the recipe's relative paths start.
        log: Takes records {"event": "tool_server_opened" | "tool_server_lost", "server": name, ...}.

    Raises:
        UserCodeError, TypeError, ValueError: the recipe is wrong: a reference that cannot be loaded, what cannot be
            served, an unset environment variable, names that clash, an environment without its hidden tools.
        ToolInfrastructureError: a server could not be started or reached.
    """
    entries = [(reference.rpartition(":")[2], McpServerConfig(module=reference)) for reference in recipe.tools]
    connections: dict[str, tuple[Connection, McpServerConfig]] = {}
    for name, config in [*entries, *recipe.mcp_servers.items()]:
        if name in connections:
            raise ValueError(f"two tool servers are called {name}: rename one in tools or mcp_servers")
        target: Target
        if config.module is not None:
            target = build_server([load_object(config.module, base)], name)
        else:
            target = remote_target(name, config, base)
        connections[name] = (Connection(name, target, config.timeout_seconds, log), config)

    try:
        await asyncio.gather(*(connection.open() for connection, _ in connections.values()))
        yield Toolset([_Server(connection, config.environment) for connection, config in connections.values()])
    finally:
        await asyncio.gather(*(connection.close() for connection, _ in connections.values()))


class _Server:
    """What one connection offers: tools for the model, and perhaps an environment."""

    def __init__(self, connection: Connection, environment: EnvironmentTools | None) -> None:
        self.connection = connection
        self.name = connection.name
        listed = {tool.name: tool for tool in connection.tools}
        self.environment = environment or _declared_environment(connection.tools)
        self.hidden: dict[str, Tool] = {}
        for role in ("reset", "reward", "close") if self.environment else ():
            tool = getattr(self.environment, role)
            if tool is None:
                continue
            if tool not in listed:
                raise ValueError(
                    f"mcp_servers.{self.name}.environment.{role}: the server has no tool {tool!r}, it offers "
                    f"{', '.join(listed) or 'none'}" + ("; set it to null" if role == "close" else "; name one of them")
                )
            self.hidden[role] = listed[tool]
        hidden = {tool.name for tool in self.hidden.values()}
        self.tools = [tool for tool in connection.tools if tool.name not in hidden]


def _declared_environment(tools: Sequence[Tool]) -> EnvironmentTools | None:
    """The environment that a server of ours says it is."""
    roles = {(tool.meta or {}).get(ROLE_KEY): tool.name for tool in tools}
    if "reset" not in roles:
        return None
    return EnvironmentTools(**{role: roles[role] for role in ("reset", "reward", "close")})


@dataclass(frozen=True)
class _Route:
    """Where a tool's calls go. `validator` is set where the server does not tell wrong arguments from other errors."""

    server: _Server
    validator: Validator | None


class Toolset:
    """The tools of a recipe. `specs` is what a model is told, in the order of the recipe and of each server's list."""

    def __init__(self, servers: "Sequence[_Server]") -> None:
        self._servers = servers
        self._routes: dict[str, _Route] = {}
        self.specs: list[ToolSpec] = []
        for server in servers:
            for tool in server.tools:
                if other := self._routes.get(tool.name):
                    raise ValueError(
                        f"the tool {tool.name} is offered by {other.server.name} and by {server.name}; "
                        "a model could not tell them apart: leave one out, or rename it"
                    )
                self._routes[tool.name] = _Route(server, _validator(server.name, tool))
                self.specs.append(ToolSpec(tool.name, tool.description or "", tool.input_schema))

    @asynccontextmanager
    async def chain(self, key: str, task: dict[str, Any]) -> "AsyncIterator[ToolSession]":
        """Let the chain `key`, unique in this run, act on `task`: reset its environments, and close them at the end.

        Raises:
            ToolInfrastructureError: an environment could not be reset, or its server died.
        """
        session = ToolSession(key, self._servers, self._routes)
        try:
            await session.reset(task)
            yield session
        finally:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await session.close()


class ToolSession:
    """One chain's way to the tools. `opening` is the text that its environments' resets gave, or None."""

    def __init__(self, key: str, servers: Sequence[_Server], routes: dict[str, _Route]) -> None:
        self._key = key
        self._environments = [server for server in servers if server.environment]
        self._routes = routes
        self._asked: set[str] = set()  # environments that are to be closed, whatever became of their reset
        self._generations: dict[str, int] = {}  # of the server processes that hold this chain's state
        # an environment gets a chain's calls one by one, in the order in which they were made, on every transport
        self._order = {server.name: asyncio.Lock() for server in self._environments}
        self.opening: str | None = None

    async def call(self, call: ToolCall) -> ToolResult:
        """Make one call. Whatever the model did wrong comes back as a result that it can read.

        Raises:
            ToolInfrastructureError: the server died, broke the protocol, or lost this chain's state.
        """
        started = time.perf_counter()
        content, error = await self._call(call)
        return ToolResult(content, error, time.perf_counter() - started)

    async def _call(self, call: ToolCall) -> tuple[str, CallError | None]:
        route = self._routes.get(call.name)
        if route is None:
            known = f"The tools are: {', '.join(self._routes)}." if self._routes else "There are no tools."
            return f"There is no tool {call.name!r}. {known}", CallError.UNKNOWN_TOOL
        if fault := _fault(call.arguments, route.validator):
            return f"Invalid arguments for {call.name}: {fault}.", CallError.INVALID_ARGUMENTS
        server = route.server
        try:
            if lock := self._order.get(server.name):
                async with lock:
                    result = await self._request(server, call.name, call.arguments)
            else:
                result = await self._request(server, call.name, call.arguments)
        except CallTimeout as timeout:
            return f"{timeout}.", CallError.TIMEOUT
        except MCPError as refusal:
            if refusal.code != INVALID_PARAMS:
                raise ToolInfrastructureError(f"tool server {server.name}, call of {call.name}: {refusal}") from refusal
            return f"Invalid arguments for {call.name}: {refusal}.", CallError.INVALID_ARGUMENTS
        if result.is_error:
            return _text(result), CallError((result.meta or {}).get(ERROR_KEY, CallError.TOOL_ERROR))
        return _text(result), None

    async def reward(self) -> EnvironmentReward | None:
        """The environment's verdict on the chain; None without an environment.

        Several environments' rewards are added up, and their metrics carry the server's name before a slash.

        Raises:
            EnvironmentRewardError: reward() failed, or its answer is no number and no object with `reward`.
            ToolInfrastructureError: the server died, or lost this chain's state.
        """
        if not self._environments:
            return None
        total = EnvironmentReward(0.0)
        for server in self._environments:
            one = _verdict(server.name, await self._control(server, "reward", {}, EnvironmentRewardError))
            if len(self._environments) > 1:
                one.metrics = {f"{server.name}/{key}": value for key, value in one.metrics.items()}
            try:
                total.add(one)
            except ValueError as error:
                raise EnvironmentRewardError(
                    f"environment {server.name}: its turn_rewards are not as many as another's"
                ) from error
        return total

    async def reset(self, task: dict[str, Any]) -> None:
        """Begin `task` in every environment. Called by `Toolset.chain`."""
        openings = await asyncio.gather(*(self._reset(server, task) for server in self._environments))
        self.opening = "\n".join(text for text in openings if text) or None

    async def _reset(self, server: _Server, task: dict[str, Any]) -> str:
        schema = server.hidden["reset"].input_schema
        fields = task
        if not schema.get("additionalProperties"):
            fields = {key: value for key, value in task.items() if key in schema.get("properties", {})}
        if missing := [key for key in schema.get("required", []) if key not in task]:
            raise ToolInfrastructureError(
                f"environment {server.name}: reset needs {', '.join(missing)}, which the task does not have; "
                f"its fields are {', '.join(task) or 'none'}"
            )
        self._asked.add(server.name)
        result = await self._control(server, "reset", fields)
        self._generations[server.name] = server.connection.generation
        return _text(result)

    async def close(self) -> None:
        """Let go of the environments; one that fails to close is only logged. Called by `Toolset.chain`."""
        await asyncio.gather(*(self._close(server) for server in self._environments))

    async def _close(self, server: _Server) -> None:
        # a server that died holds nothing any more, and is not started for a farewell
        if server.name in self._asked and "close" in server.hidden and server.connection.alive:
            try:
                await self._control(server, "close", {})
            except ToolInfrastructureError as error:
                logger.info("%s", error)

    async def _control(
        self,
        server: _Server,
        role: str,
        arguments: dict[str, Any],
        failure: type[ToolInfrastructureError] = ToolInfrastructureError,
    ) -> CallToolResult:
        """Call one of an environment's hidden tools, which has to succeed."""
        tool = server.hidden[role].name
        try:
            async with self._order[server.name]:
                result = await self._request(server, tool, arguments)
        except (CallTimeout, MCPError) as error:
            raise ToolInfrastructureError(f"environment {server.name}: {tool}: {error}") from error
        if result.is_error:
            raise failure(f"environment {server.name}: {tool}: {_text(result)}")
        return result

    async def _request(self, server: _Server, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        return await server.connection.call(tool, arguments, self._key, self._generations.get(server.name))


def _validator(server: str, tool: Tool) -> Validator | None:
    if ROLE_KEY in (tool.meta or {}):
        return None
    kind = validator_for(tool.input_schema)
    try:
        kind.check_schema(tool.input_schema)
    except SchemaError as error:
        raise ToolInfrastructureError(f"tool server {server}: {tool.name} has an invalid schema: {error}") from None
    return kind(tool.input_schema, registry=Registry())  # an empty registry: nothing is fetched for a `$ref`


def _fault(arguments: dict[str, Any], validator: Validator | None) -> str | None:
    """What is wrong with `arguments` as far as can be seen here."""
    if _is_deeper(arguments, _MAX_DEPTH):
        return f"they are nested more than {_MAX_DEPTH} levels deep"
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # NaN, infinity or a lone surrogate, which a model can write and nobody can send
        return f"not JSON in UTF-8: {error}"
    if validator is not None and (mismatch := best_match(validator.iter_errors(arguments))):
        return f"{mismatch.json_path.removeprefix('$').removeprefix('.') or 'the arguments'}: {mismatch.message}"
    return None


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    return levels == 0 or any(
        _is_deeper(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _text(result: CallToolResult) -> str:
    """A result as text for the model, one line or more per part."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: ContentBlock) -> str:
    """Text as it is; anything else as a visible marker, so that nothing is dropped without a trace."""
    match block:
        case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
            return text
        case ImageContent(mime_type=kind):
            return f"[{kind} image]"
        case AudioContent(mime_type=kind):
            return f"[{kind} audio]"
        case ResourceLink(uri=uri):
            return f"[resource {uri}]"
        case EmbeddedResource(resource=resource):
            return f"[{resource.mime_type or 'binary'} resource {resource.uri}]"


def _verdict(server: str, result: CallToolResult) -> EnvironmentReward:
    """The reward in an answer: an object, or text that is JSON of a number or an object."""
    answer: Any = result.structured_content
    try:
        if answer is None:
            answer = json.loads(_text(result))
        if isinstance(answer, dict) and "reward" not in answer and set(answer) == {"result"}:
            answer = answer["result"]  # how the SDK's MCPServer wraps a plain return value
        return EnvironmentReward.parse(answer, "it")
    except (ValueError, TypeError) as error:
        raise EnvironmentRewardError(f"environment {server}: reward answered {_text(result)!r}: {error}") from None
