"""`ToolSession`: one chain's access to the tools."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from mcp_types import CallToolResult

from agentfactory.base.errors import short
from agentfactory.base.messages import (
    CallError,
    Content,
    EnvironmentReward,
    EnvironmentRewardError,
    ToolCall,
    ToolInfrastructureError,
    ToolResult,
    properties_of,
    required_of,
    text_of,
)
from agentfactory.base.run_notices import notify
from agentfactory.tools.calls.argument_check import ArgumentCheck, UncheckedError
from agentfactory.tools.calls.limits import Deadline
from agentfactory.tools.calls.mcp_results import ERROR_KEY, FINISH_KEY, INFO_KEY, content_of, unread_of
from agentfactory.tools.calls.truncation import left_out_of
from agentfactory.tools.environments.environment import ANCHOR_KEY, anchor_text
from agentfactory.tools.environments.pool import Lease
from agentfactory.tools.mcp_servers.recipe_server import ToolServer
from agentfactory.tools.mcp_servers.server_connection import CallTimeout, Connection

logger = logging.getLogger(__name__)

_MAX_DEPTH = 64
"""Maximum nesting of arguments. The SDK drops arguments nested some 200 levels deep, and the call would hang."""
_CLOSE_SECONDS = 10.0
_TAKE_IMAGES = "take_images"
"""Role of the environment's tool that takes images and returns a label for each."""
_NAMED_VALUES = 4


@dataclass(frozen=True)
class Route:
    """The destination of a tool's calls; `check` is set if the server does not tell wrong arguments apart."""

    server: ToolServer
    tool: str
    check: ArgumentCheck | None


@dataclass
class _Share:
    server: ToolServer
    connection: Connection
    lease: Lease[Connection] | None
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes a chain's calls of an environment in the order in which they were made, on every transport."""
    asked: bool = False
    """True once a reset began: the environment must then be closed, even if the reset failed."""
    generation: int | None = None
    spoiled: bool = False
    """True if the instance must not serve another chain: it failed, or may still be running an abandoned call."""
    anchored: bool = False
    anchor: str | None = None
    """Anchor of the state after the last call; None if it is unknown."""


class ToolSession:
    """One chain's access to tools. `opening`: what resets return; `left_out`: bytes cut from it, by environment."""

    def __init__(
        self, key: str, servers: Sequence[ToolServer], routes: Mapping[str, Route], of_user: Mapping[str, Route]
    ) -> None:
        self.opening: Content | None = None
        self.left_out: dict[str, int] = {}
        self.waits: list[tuple[str, float, float]] = []
        """Waits for an instance of a server: (server name, begin, end), in seconds of time.monotonic()."""
        self._key = key
        self._servers = servers
        self._routes = routes
        self._of_user = of_user
        self._shares: dict[str, _Share] = {}

    @property
    def anchored(self) -> bool:
        """True if an environment gives anchors, even if each of them is None."""
        return any(share.anchored for share in self._shares.values())

    @property
    def anchor(self) -> str | None:
        """Anchor of the chain's state over all environments that give one; None if one has none."""
        anchors = [share.anchor for share in self._shares.values() if share.anchored]
        if not anchors or None in anchors:
            return None
        return anchors[0] if len(anchors) == 1 else anchor_text(anchors)

    async def call(self, call: ToolCall, timeout_seconds: float | None = None, by_user: bool = False) -> ToolResult:
        """Make one call within a time limit: the agent's, or (`by_user`) the simulated user's. The caller's errors are
        results. Raises ToolInfrastructureError."""
        started = time.perf_counter()
        routes = self._of_user if by_user else self._routes
        route = routes.get(call.name)
        if route is None:
            known = f"The tools are: {', '.join(routes)}." if routes else "There are no tools."
            return _refusal(f"There is no tool {call.name!r}. {known}", CallError.UNKNOWN_TOOL, started)
        if fault := _fault(call.arguments, route):
            return _refusal(f"Invalid arguments for {call.name}: {fault}.", CallError.INVALID_ARGUMENTS, started)
        seconds = route.server.config.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            share = self._shares[route.server.name]
            async with share.order if route.server.environment is not None else nullcontext():
                result = await self._request(share, route.tool, call.arguments, seconds)
        except CallTimeout:
            return _refusal(f"{call.name} did not answer within {seconds:g} s.", CallError.TIMEOUT, started)
        meta = result.meta or {}
        info = meta.get(INFO_KEY)
        error = _KINDS.get(str(meta.get(ERROR_KEY)), CallError.TOOL_ERROR) if result.is_error else None
        content = content_of(result)
        if route.check is not None and (unread := unread_of(result)):
            names = ", ".join(unread[:_NAMED_VALUES]) + (", ..." if len(unread) > _NAMED_VALUES else "")
            server = route.server.name
            text = f"tool server {server}: the text of {route.tool} lacks values of its structuredContent ({names})"
            notify(logger, f"structured content of {server}", f"{text}; models read the text")
        if error is CallError.INVALID_ARGUMENTS and isinstance(content, str):
            # our own server does not know the prefixed name that the model uses
            content = content.replace(f"Invalid arguments for {route.tool}:", f"Invalid arguments for {call.name}:", 1)
        seconds, finish = time.perf_counter() - started, meta.get(FINISH_KEY) is True
        left_out = _left_out(content, route.server.result_bytes)
        return ToolResult(content, error, seconds, finish, dict(info) if isinstance(info, dict) else {}, left_out)

    async def number_images(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[ToolResult]:
        """Return results with labels before images, if an environment has any. Raises ToolInfrastructureError."""
        routes = [self._routes.get(call.name) for call in calls]
        return [
            replace(result, content=await self._numbered(result.content, None if route is None else route.server))
            for route, result in zip(routes, results, strict=True)
        ]

    async def _numbered(self, content: Content, origin: ToolServer | None) -> Content:
        """Return content from the server `origin` (None: from no server) with labels before its images."""
        taker = next((server for server in self._servers if _TAKE_IMAGES in server.hidden), None)
        if taker is None or origin in (taker, None) or isinstance(content, str):
            return content
        images = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        if not images:
            return content
        answer = await self._control(self._shares[taker.name], _TAKE_IMAGES, {"images": images})
        told = iter((answer.structured_content or {})["told"])
        parts: list[dict[str, Any]] = []
        for part in content:
            if part["type"] == "image_url" and (text := next(told)):
                parts.append({"type": "text", "text": text})
            parts.append(part)
        return parts

    async def reward(self, prediction: str = "") -> EnvironmentReward | None:
        """Return the environments' rewards for the chain, added up, with metrics as `SERVER/...` if there are several;
        None without one. Raises EnvironmentRewardError for a wrong answer, ToolInfrastructureError."""
        judges = [share for share in self._shares.values() if "reward" in share.server.hidden]
        if not judges:
            return None
        total = EnvironmentReward(0.0)
        for share in judges:
            name = share.server.name
            takes = "prediction" in properties_of(share.server.hidden["reward"].input_schema)
            arguments = {"prediction": prediction} if takes else {}
            one = _verdict(name, await self._control(share, "reward", arguments, failure=EnvironmentRewardError))
            if len(judges) > 1:
                one.metrics = {f"{name}/{key}": value for key, value in one.metrics.items()}
            try:
                total.add(one)
            except ValueError as error:
                problem = "its turn_rewards differ in number from another environment's"
                raise EnvironmentRewardError(f"environment {name}: {problem}") from error
            except TypeError as error:
                raise EnvironmentRewardError(f"environment {name}: {error}") from error
        return total

    async def begin(self, task: dict[str, Any], limit: Deadline | None = None) -> None:
        """Connect to servers, in one order against deadlocks; reset environments. Raises ToolInfrastructureError."""
        doing, openings, resetting = "", [], list[ToolServer]()

        def note() -> None:
            nonlocal doing
            if resetting and (activity := resetting[-1].activity(self._key)) is not None:
                doing = f"environment {resetting[-1].name}: {activity}"

        # just before the limit cancels what it waits for
        noting = None
        if limit is not None and math.isfinite(limit.until):
            noting = asyncio.get_running_loop().call_at(math.nextafter(limit.until, -math.inf), note)
        try:
            async with asyncio.timeout_at(limit.until if limit else None) as timer:
                for server in self._servers:
                    asked, doing = time.monotonic(), f"tool server {server.name}: the wait for an instance"
                    connection, lease = await server.acquire()
                    if lease is not None:
                        self.waits.append((server.name, asked, time.monotonic()))
                    share = self._shares[server.name] = _Share(server, connection, lease)
                    if server.environment:
                        resetting.append(server)
                        doing = f"environment {server.name}: its reset (or the wait for an instance)"
                        openings.append((await self._reset(share, task), server))
                numbered = [await self._numbered(content, server) for content, server in openings]
        except TimeoutError:
            if limit is None or not timer.expired():
                raise
            raise ToolInfrastructureError(f"{doing} took longer than {limit.setting}") from None
        finally:
            if noting is not None:
                noting.cancel()
        self.opening = _joined([content for content in numbered if content])

    async def close(self) -> None:
        """Release everything; log environments that fail to close. Called by `Toolset.chain`."""
        await asyncio.gather(*(self._let_go(share) for share in self._shares.values()))

    async def _reset(self, share: _Share, task: dict[str, Any]) -> Content:
        server, schema = share.server, share.server.hidden["reset"].input_schema
        takes_all = schema.get("additionalProperties")
        fields = {key: value for key, value in task.items() if takes_all or key in properties_of(schema)}
        if missing := [key for key in required_of(schema) if key not in task]:
            problem = f"reset needs {', '.join(missing)}, which the task does not have"
            told = f"{problem}; its fields are {', '.join(task) or 'none'}"
            raise ToolInfrastructureError(f"environment {server.name}: {told}")
        share.asked = True
        seconds = server.config.timeout_seconds
        result = await self._control(share, "reset", fields, server.reset_seconds, reset_seconds=seconds)
        share.generation = share.connection.generation
        content = content_of(result)
        if left_out := _left_out(content, server.result_bytes):
            self.left_out[server.name] = left_out
        return content

    async def _let_go(self, share: _Share) -> None:
        replaced = share.server.isolated and share.spoiled
        try:
            # a dead server has lost its state; do not restart it only to close it
            if share.asked and "close" in share.server.hidden and share.connection.alive and not replaced:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._control(share, "close", {})
        except (ToolInfrastructureError, TimeoutError) as error:
            share.spoiled = True
            if share.generation not in (None, share.connection.generation):
                return  # it died meanwhile, which was told
            name = share.server.name
            kind = share.server.environment_class
            what = f"its {share.server.hidden['close'].name}" if kind is None else f"{kind.__name__}.release()"
            late = f"it did not return within {_CLOSE_SECONDS:g} s; fix: correct it"
            notify(logger, f"close of {name}", f"environment {name}: {what} failed: {str(error) or late}")
        finally:
            if share.lease is not None:
                await share.lease.release(broken=share.server.isolated and share.spoiled)

    async def _control(
        self,
        share: _Share,
        role: str,
        arguments: dict[str, Any],
        timeout_seconds: float | None = None,
        failure: type[ToolInfrastructureError] = ToolInfrastructureError,
        reset_seconds: float | None = None,
    ) -> CallToolResult:
        server = share.server
        tool = server.hidden[role].name
        try:
            async with share.order:
                result = await self._request(share, tool, arguments, timeout_seconds, reset_seconds)
        except CallTimeout as error:
            fix = f"correct it, or raise mcp_servers.{server.name}.timeout_seconds"
            raise failure(f"environment {server.name}: {error}; fix: {fix}") from error
        if result.is_error:
            raise failure(f"environment {server.name}: {tool}: {text_of(content_of(result))}")
        return result

    async def _request(
        self,
        share: _Share,
        tool: str,
        arguments: dict[str, Any],
        timeout_seconds: float | None,
        reset_seconds: float | None = None,
    ) -> CallToolResult:
        limits = timeout_seconds, reset_seconds
        try:
            result = await share.connection.call(tool, arguments, self._key, share.generation, *limits)
        except (CallTimeout, ToolInfrastructureError, asyncio.CancelledError):
            share.spoiled, share.anchor = True, None
            raise
        meta = result.meta or {}
        if ANCHOR_KEY in meta:
            given = meta[ANCHOR_KEY]
            share.anchored, share.anchor = True, None if given is False else anchor_text(given)
        elif result.is_error and meta.get(ERROR_KEY) != CallError.INVALID_ARGUMENTS:
            share.anchor = None  # unknown
        return result


_KINDS = {kind.value: kind for kind in CallError}


def _refusal(text: str, error: CallError, started: float) -> ToolResult:
    return ToolResult(text, error, time.perf_counter() - started)


def _left_out(content: Content, most: int) -> int:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return sum(found.size for text in texts if (found := left_out_of(text, most)))


def _joined(contents: list[Content]) -> Content | None:
    if not any(isinstance(content, list) for content in contents):
        return "\n".join(text_of(content) for content in contents) or None
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for some in parts for part in some]


def _fault(arguments: dict[str, Any], route: Route) -> str | None:
    """Return the fault of a call's arguments, as far as it can be checked here; None if there is none."""
    if _is_deeper(arguments, _MAX_DEPTH):
        return f"they are nested more than {_MAX_DEPTH} levels deep"
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # NaN, infinity or a lone surrogate, which a model can write but JSON cannot carry
        return f"not JSON in UTF-8: {error}"
    try:
        return route.check.fault(arguments) if route.check is not None else None
    except UncheckedError as error:
        text = f"tool server {route.server.name}: arguments of {route.tool} could not be checked against its schema"
        notify(logger, f"unchecked arguments of {route.server.name}", f"{text}: {error}")
        return None


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    return levels == 0 or any(
        _is_deeper(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _verdict(server: str, result: CallToolResult) -> EnvironmentReward:
    answer: Any = result.structured_content
    try:
        if answer is None:
            answer = json.loads(text_of(content_of(result)))
        if isinstance(answer, dict) and "reward" not in answer and set(answer) == {"result"}:
            answer = answer["result"]  # the SDK's MCPServer wraps a plain return value this way
        return EnvironmentReward.parse(answer, "it")
    except (ValueError, TypeError, RecursionError) as error:
        said = short(text_of(content_of(result)))
        raise EnvironmentRewardError(f"environment {server}: reward answered {said}: {error}") from None
