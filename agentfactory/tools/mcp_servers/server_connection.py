"""Connections to MCP servers: in this process, on stdio, or over streamable HTTP. One owner task opens and closes each,
because of the SDK's cancel scopes, and reopens a dead one for the next call."""

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import httpx2
import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import MCP_SESSION_ID
from mcp.client.subscriptions import SubscriptionLost
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from agentfactory.base.config import RESULT_BYTES
from agentfactory.base.errors import short
from agentfactory.base.http.proxies import Proxy, proxy_for, through
from agentfactory.base.messages import CallError, ToolInfrastructureError
from agentfactory.base.run_notices import inform, notify
from agentfactory.base.user_code.loading import fix_of_old_mcp
from agentfactory.tools.calls.mcp_results import bounded, failure
from agentfactory.tools.calls.message_bounds import TOO_LARGE
from agentfactory.tools.environments.environment_host import ANCHOR
from agentfactory.tools.environments.workspaces import ChainProgram
from agentfactory.tools.mcp_servers.own_server import CHAIN_KEY, NOT_FOR_MODELS, SECONDS_KEY, OwnServer
from agentfactory.tools.mcp_servers.server_entry import Container, HttpAddress, Target
from agentfactory.tools.mcp_servers.server_messages import error_data, error_text, list_tools, servers_own
from agentfactory.tools.mcp_servers.stdio import collected_stderr, stdio_transport
from agentfactory.tools.mcp_servers.streamable_http import http_client

logger = logging.getLogger(__name__)
# the SDK logs tracebacks of what we name ourselves; without a handler, Python would print them
logging.getLogger("mcp").addHandler(logging.NullHandler())

Log = Callable[[dict[str, Any]], None]

REOPEN_DELAYS = (0.0, 0.5, 2.0)
"""Seconds to wait before reopening a lost connection, by consecutive failures; after the last one, give up."""
QUIET_SECONDS = 10.0
_SHOWN = 1000
OPEN_SECONDS = 120.0
"""Time limit for starting a server and listing its tools; `npx` may have to download it first."""
LISTEN_DELAYS = (1.0, 10.0, 60.0)
"""Seconds to wait before listening to a server's changes again, by consecutive ends of the stream."""


class CallTimeout(Exception):
    """A call was not answered within its time limit; the connection stays open."""

    def __init__(self, tool: str, seconds: float) -> None:
        super().__init__(f"{tool} did not answer within {seconds:g} s")


class Connection:
    """One MCP server, kept open from `open` to `close`. `generation` counts openings, which lose its state; without
    `reopens` it stays lost. `on_list` gets each list of tools, and returns differences by name."""

    def __init__(
        self,
        name: str,
        target: Target,
        timeout_seconds: float,
        log: Log,
        reopens: bool = True,
        result_bytes: int = RESULT_BYTES,
        on_list: Callable[[Sequence[mcp_types.Tool]], dict[str, str]] = lambda tools: {},
    ) -> None:
        self.name = name
        self._on_list = on_list
        self._result_bytes = result_bytes
        self.reopens = reopens
        self.pid: int | None = None  # of the server, if it is our child
        self.timeout_seconds = timeout_seconds
        self.generation = 0
        self.tools: list[mcp_types.Tool] = []
        self._target = target
        self._log = log
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._wanted, self._ended = asyncio.Event(), asyncio.Event()
        self._opening = self._closing = False
        self._used = False  # a call succeeded since the last opening
        self._in_session = False  # the server gave us a session
        self._changed = False  # the server announced a change of its tools while it was being opened
        self._unknown = False  # the server answers but does not know our session: it was restarted
        self._failure = ""  # why the connection was given up
        self._stderr_tail = ""
        self._proxy: Proxy | None = None
        self._owner: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the server. Raises ToolInfrastructureError if it cannot be started or reached."""
        self._owner = asyncio.create_task(self._own(), name=f"tool server {self.name}")
        await self._connected()

    async def close(self) -> None:
        """Close the server, and wait until a child process has ended."""
        self._closing = True
        if self._owner is not None:
            if self._opening:
                self._owner.cancel()
            self._ended.set()
            self._wanted.set()
            await asyncio.wait({self._owner})
        self._client.cancel()

    @property
    def alive(self) -> bool:
        return self._client.done() and not self._failure and not self._closing

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        chain: str,
        generation: int | None = None,
        timeout_seconds: float | None = None,
        reset_seconds: float | None = None,
    ) -> mcp_types.CallToolResult:
        """Call `tool` for `chain`, whose state is in the process of `generation`, if given. Raises CallTimeout, and
        ToolInfrastructureError if the server is gone, lost the state, changed the tool or broke the protocol."""
        client = await self._connected()
        if generation not in (None, self.generation):
            raise ToolInfrastructureError(f"tool server {self.name} was restarted and lost this chain's state")
        generation = self.generation
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            if isinstance(self._target, OwnServer):
                with anyio.fail_after(seconds):
                    result = await self._target.call(tool, arguments, chain, reset_seconds)
            else:
                limit = {} if reset_seconds is None else {SECONDS_KEY: reset_seconds}
                meta = cast(mcp_types.RequestParamsMeta, {CHAIN_KEY: chain, **limit})
                result = await client.call_tool(tool, arguments, read_timeout_seconds=seconds, meta=meta)
        except TimeoutError:
            host = self._target.host if isinstance(self._target, OwnServer) else None
            if host is not None and host.running(chain) == ANCHOR:
                text = f"{host.activity(chain)}, after {tool}, did not return within {seconds:g} s"
                raise ToolInfrastructureError(f"tool server {self.name}: {text}; fix: correct it") from None
            raise CallTimeout(tool, seconds) from None
        except MCPError as error:
            if servers_own(error) or isinstance(self._target, Server | MCPServer):
                # after an answer that could say so, the server may no longer know our session
                unknown, self._unknown = self._unknown, False
                if not unknown or await self.answers():
                    return bounded(await self._failed(client, tool, error), self._result_bytes)
            elif error.code == mcp_types.REQUEST_TIMEOUT:
                raise CallTimeout(tool, seconds) from None
            elif error.code != mcp_types.CONNECTION_CLOSED and not self._unknown:
                raise ToolInfrastructureError(f"tool server {self.name}, call of {tool}: {error}") from error
            self._lost(generation)
            raise ToolInfrastructureError(f"tool server {self.name} died during a call of {tool}") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self._lost(generation)
            raise ToolInfrastructureError(f"tool server {self.name} died before a call of {tool}") from error
        except (RuntimeError, ValueError) as error:  # from the SDK: data that fits no schema
            raise ToolInfrastructureError(f"tool server {self.name}, call of {tool}: {error}") from error
        self._used = True
        return bounded(result, self._result_bytes)

    async def _failed(self, client: Client, tool: str, error: MCPError) -> mcp_types.CallToolResult:
        """Return the model's result of a call that the server answered with a JSON-RPC error."""
        self._used = True
        data, text = error_data(error), error_text(error)
        if isinstance(data, dict) and NOT_FOR_MODELS in data:
            raise ToolInfrastructureError(f"tool server {self.name}, call of {tool}: {error.error.message}") from error
        if error.code in (mcp_types.INVALID_PARAMS, mcp_types.METHOD_NOT_FOUND) and (
            change := (await self._list(client)).get(tool)
        ):
            raise ToolInfrastructureError(f"tool server {self.name}: {tool} {change} since the run began: {text}")
        if error.code == mcp_types.INVALID_PARAMS:
            end = "" if "\n" in text or text.endswith((".", "!", "?")) else "."
            return failure(CallError.INVALID_ARGUMENTS, f"Invalid arguments for {tool}: {text}{end}")
        if error.code != TOO_LARGE:
            what = f"tool server {self.name} answered a call of {tool} with the error {error.code}, {short(text)}"
            notify(logger, f"errors of {self.name}", f"{what}; the model reads it as an error of the tool")
        return failure(CallError.TOOL_ERROR, text)

    async def _list(self, client: Client) -> dict[str, str]:
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return self._on_list(await list_tools(client))
        except (MCPError, TimeoutError, ToolInfrastructureError, anyio.ClosedResourceError) as error:
            logger.info("tool server %s: its tools could not be listed again: %s", self.name, error)
            return {}

    async def _receive(self, message: IncomingMessage) -> None:
        if not isinstance(message, mcp_types.ToolListChangedNotification):
            return
        if self._opening:
            self._changed = True
        elif self._client.done() and not self._closing:
            await self._list(self._client.result())

    async def _listen(self, client: Client) -> None:
        """Follow changes of the list of tools with the newer protocol, which announces them only to listeners."""
        tools = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        ends = 0
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    if ends:
                        await self._list(client)  # changes in between were not announced
                    async for _ in changes:
                        ends = 0  # `_receive` gets each change too
                reason = "the server ended the stream"
            except (MCPError, SubscriptionLost, TimeoutError, anyio.ClosedResourceError) as error:
                if isinstance(error, MCPError) and error.code == mcp_types.METHOD_NOT_FOUND:
                    logger.info("tool server %s: changes of its tools are not announced: %s", self.name, error)
                    return
                reason = str(error)
            logger.info("tool server %s: listening for changes of its tools ended: %s", self.name, reason)
            await asyncio.sleep(LISTEN_DELAYS[min(ends, len(LISTEN_DELAYS) - 1)])
            ends += 1

    async def answers(self) -> bool:
        """Return whether the server still answers and knows this connection, as far as its protocol can tell."""
        if not self.alive:
            return False
        client = self._client.result()
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return True
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await client.session.send_ping()
        except (MCPError, TimeoutError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True

    async def _connected(self) -> Client:
        if self._failure or self._closing:
            raise ToolInfrastructureError(f"tool server {self.name}: {self._failure or 'closed'}")
        if self._client.done():
            return self._client.result()
        self._wanted.set()
        return await asyncio.shield(self._client)

    def _lost(self, generation: int | None = None) -> None:
        """Note that the connection of `generation` (None: the present one) ended: the next call waits for a new one."""
        if generation in (None, self.generation) and self._client.done():
            self._client = asyncio.get_running_loop().create_future()
            self._ended.set()

    async def _own(self) -> None:
        failures = 0
        while not self._failure:
            await self._wanted.wait()
            await asyncio.sleep(REOPEN_DELAYS[failures])
            if self._closing:
                return
            reason = await self._live()
            if self._closing:
                return
            failures = 0 if self._used else failures + 1
            self._log({"event": "tool_server_lost", "server": self.name, "reason": reason, "failures": failures})
            if self.generation > 0:
                again = "it is started again" if self.reopens else "another instance is created"
                text = f"tool server {self.name} was lost, and {again}: {reason}; chains that used it failed"
                notify(logger, f"tool server {self.name} was lost", text)
            if self.generation == 0 or not self.reopens:
                self._failure = reason
            elif failures == len(REOPEN_DELAYS):
                self._failure = f"given up after {failures} failures: {reason}"
        self._client.set_exception(ToolInfrastructureError(f"tool server {self.name}: {self._failure}"))
        self._client.exception()  # retrieved, in case nobody is waiting

    async def _live(self) -> str:
        started = time.perf_counter()
        self._ended.clear()
        self._used = self._unknown = self._in_session = self._changed = False
        self._stderr_tail = ""
        self._opening = True
        limit = asyncio.timeout(OPEN_SECONDS)
        text = f"tool server {self.name} has not started after {QUIET_SECONDS:g} s; it is given {OPEN_SECONDS:g} s"
        slow = asyncio.get_running_loop().call_later(QUIET_SECONDS, inform, logger, f"{text}: {_where(self._target)}")
        try:
            async with AsyncExitStack() as stack:
                async with limit:
                    client = await stack.enter_async_context(self._connect())
                    self.tools = await list_tools(client)
                    if self._changed:  # such as by a server that adds tools once it is connected
                        self.tools = await list_tools(client)
                slow.cancel()
                self._on_list(self.tools)
                self._opening = False
                self._wanted.clear()
                self.generation += 1
                if self.reopens:  # connections of a pool open and close often; its gauges count them
                    seconds = time.perf_counter() - started
                    self._log({"event": "tool_server_opened", "server": self.name, "seconds": seconds})
                self._client.set_result(client)
                listening = asyncio.create_task(self._listen(client), name=f"changes of {self.name}")
                try:
                    await self._ended.wait()
                finally:
                    listening.cancel()
                    await asyncio.wait({listening})
            reason = "the connection ended"
        except Exception as error:  # boundary: starting a process, connecting, the handshake, the transport
            # the transport's task groups wrap a TimeoutError
            reason = f"not ready within {OPEN_SECONDS:g} s" if limit.expired() else _describe(error)
        finally:
            slow.cancel()
            self._opening = False
            self._lost()
        stderr = self._stderr_tail.strip()
        end = f"; the end of its stderr:\n{stderr}" if stderr else ""
        if fix := fix_of_old_mcp(stderr):
            end += f"\n; fix: {fix}, or set mcp_servers.{self.name}.command to a Python with mcp<2"
        return f"{_where(self._target)}: {reason}{through(self._proxy)}{end}"

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Client]:
        target = self._target

        def tell(repair: str) -> None:
            notify(logger, f"messages of {self.name}", f"tool server {self.name}: {repair}")

        async with AsyncExitStack() as stack:
            if isinstance(target, (Container, ChainProgram)):
                target = await stack.enter_async_context(target.running())
            if isinstance(target, HttpAddress):
                self._proxy = proxy_for(target.url)
                http = http_client(target, self._proxy, self._note, self._result_bytes, tell, self._receive)
                client = await stack.enter_async_context(http)
                if target.session and not self._in_session:
                    raise ValueError("the server gives its clients no sessions (Mcp-Session-Id); use isolation: shared")
                yield client
                return
            served: Any = target
            if isinstance(target, StdioServerParameters):
                errlog = await stack.enter_async_context(collected_stderr(self.name, self._keep_stderr))
                note_pid = partial(setattr, self, "pid")
                most = self._result_bytes
                served = stdio_transport(target, errlog, most, tell, on_end=self._lost, on_start=note_pid)
            yield await stack.enter_async_context(Client(served, cache=None, message_handler=self._receive))

    def _keep_stderr(self, text: str) -> None:
        self._stderr_tail = (self._stderr_tail + text)[-2000:]

    def _note(self, response: httpx2.Response) -> None:
        self._in_session |= MCP_SESSION_ID in response.headers
        self._unknown |= response.status_code in (400, 404) and MCP_SESSION_ID in response.request.headers


def _where(target: Target) -> str:
    if isinstance(target, ChainProgram):
        target = target.program
    if isinstance(target, StdioServerParameters):
        return f"`{shlex.join([target.command, *target.args])}` in {target.cwd}"
    if isinstance(target, Container):
        return f"container of {target.image}"
    return target.url if isinstance(target, HttpAddress) else "in process"


def _describe(error: BaseException) -> str:
    """Return the innermost reasons of the SDK's nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(_describe(inner) for inner in error.exceptions))
    if isinstance(error, ToolInfrastructureError):
        return str(error)
    # pydantic's errors have a line per field
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
