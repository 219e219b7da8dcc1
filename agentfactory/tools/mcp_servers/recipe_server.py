"""One MCP server of a recipe: its tools, and the isolation of its chains."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mcp_types import Tool

from agentfactory.base.config import CHAIN, RESULT_BYTES, EnvironmentTools, Isolation, McpServerConfig
from agentfactory.base.messages import ToolInfrastructureError, text_of
from agentfactory.base.processes.memory import memory_of
from agentfactory.base.run_notices import notify
from agentfactory.tools.calls.mcp_results import content_of
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.environments.pool import Lease, Pool
from agentfactory.tools.mcp_servers.own_server import ROLE_KEY, OwnServer
from agentfactory.tools.mcp_servers.server_connection import CallTimeout, Connection, Log
from agentfactory.tools.mcp_servers.server_entry import Target, files_of_all
from agentfactory.tools.mcp_servers.server_messages import REPAIR

logger = logging.getLogger(__name__)

PROCESS_BYTES = 75 << 20
"""Assumed memory of a server process without its children, until one was measured."""
_SPARES = 2
"""Processes started ahead for the next chains, which would otherwise wait 0.3 to 1.2 s for their start."""
_GAUGE_SECONDS = 2.0


def _state_of(file: Path) -> list[int]:
    """Return the sizes of a file and of its write-ahead log, and the file's modification time; [] without the file."""
    found = [path.stat() for path in (file, Path(f"{file}-wal")) if os.path.isfile(path)]
    return [each.st_size for each in found] + [each.st_mtime_ns for each in found[:1]]


class ToolServer:
    """An MCP server of a recipe, from `open` to `close`. Shared: one connection for all chains, with `pool.capacity`
    places. Isolated, as programs and containers of others are by default: a pool of connections, each to a process or
    session for one chain, since only environments have a reset. `tools` are the model's, `hidden` maps roles."""

    def __init__(
        self,
        name: str,
        config: McpServerConfig,
        target: Target,
        log: Log,
        result_bytes: int = RESULT_BYTES,
        memory: int = PROCESS_BYTES,
    ) -> None:
        self.name = name
        self.config = config
        self.result_bytes = result_bytes
        self.tools: list[Tool] = []
        self.hidden: dict[str, Tool] = {}
        self.environment: EnvironmentTools | None = config.environment
        self.reset_seconds = config.timeout_seconds
        self.isolated = config.isolation not in (None, Isolation.SHARED)
        self._memory = memory  # bytes for all its processes
        self._each = PROCESS_BYTES  # bytes per process
        self._target = target
        self._host = target.host if isinstance(target, OwnServer) else None
        self._log = log
        self._shared: Connection | None = None
        self._first: list[Connection] = []  # used to list an isolated server's tools, then part of its pool
        self._pool: Pool[Connection] | None = None
        self._gauges: str | None = None
        self._files: dict[Path, list[int]] = {}  # of all chains -> state when the first process was ready
        self._ended = 0  # chains
        self._listed: dict[str, Tool] | None = None  # the tools that the run began with

    @property
    def environment_class(self) -> type[Environment] | None:
        """The class of the environment, if it runs in this process."""
        return self._host.kind if self._host is not None else None

    def activity(self, chain: str) -> str | None:
        """Return the user code that the chain's reset, or its last call, waits for; None if it is unknown."""
        return self._host.activity(chain) if self._host is not None else None

    async def open(self) -> None:
        """Start or reach the server, and list its tools. Raises ToolInfrastructureError if that fails, ValueError for
        names in `allow`, `deny` or `environment` that it does not have."""
        connection = await self._connect(reopens=not self.isolated)
        self._read(connection.tools)
        if self.config.isolation is None and (self.config.command or self.config.container):
            # our own servers give each tool a role, and identify chains by the key in each call
            self.isolated = not any(ROLE_KEY in (tool.meta or {}) for tool in connection.tools)
            connection.reopens = not self.isolated
        if self.isolated:
            self._first.append(connection)
            self._pool = self._instances()
            self._pool.advance()
            self._files = {file: _state_of(file) for file in files_of_all(self._target)}
            return
        self._shared = connection
        if self.config.module is not None:
            return  # our own host, in this process, has the pool
        for field in ("warm", "max_uses"):
            if getattr(self.config.pool, field):
                problem = "all chains share the server, so no instance is created or replaced"
                raise ValueError(f"mcp_servers.{self.name}.pool.{field}: {problem}; set isolation, or remove it")

        async def make() -> Connection:
            return connection

        if self.config.pool.capacity is not None:
            self._pool = Pool(f"tool server {self.name}", make, self.config.pool)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        for connection in filter(None, (*self._first, self._shared)):
            await connection.close()

    async def acquire(self) -> tuple[Connection, Lease[Connection] | None]:
        """Return a chain's connection, and the lease to release, or None. Raises ToolInfrastructureError."""
        if self._pool is None:
            assert self._shared is not None
            return self._shared, None
        lease = await self._pool.acquire()
        return lease.value, lease

    @property
    def why_chains_wait(self) -> tuple[str, str] | None:
        """The reason why chains wait for a process of their own, and the setting to change; None without one."""
        if not self.isolated or self._pool is None or self.config.url is not None:
            return None
        field = f"mcp_servers.{self.name}"
        if self._pool.replaces:
            fix = f"{field}.isolation: shared if it keeps no state (try it: agentfactory tools check RECIPE)"
            return "each chain starts a process of its own", fix
        return "all its processes are in use", f"raise {field}.pool.capacity"

    @property
    def isolation_text(self) -> str:
        config = self.config
        if config.url is not None:
            return "each chain has a session" if self.isolated else "all chains share the HTTP server"
        if not self.isolated:
            return "all chains share its process and its files"
        assert self._pool is not None
        folder = f", and a folder ({CHAIN})" if config.has_folders else f"; files are shared, without {CHAIN}"
        most = f"up to {self._pool.capacity} at a time, of about {self._each >> 20} MiB each"
        return f"each chain has a process{folder}; {most}"

    async def gauges(self) -> dict[str, float]:
        """Return the gauges of the pool, here or in the server; empty if there is no pool or no answer."""
        if self._pool is not None:
            return self._pool.gauges()
        if self._gauges is None or self._shared is None or not self._shared.alive:
            return {}
        try:
            result = await self._shared.call(self._gauges, {}, "", timeout_seconds=_GAUGE_SECONDS)
        except ToolInfrastructureError:
            return {}
        except CallTimeout:
            return self._no_gauges(f"did not return within {_GAUGE_SECONDS:g} s")
        if result.is_error:
            return self._no_gauges(f"raised {text_of(content_of(result))}")
        return {key: float(value) for key, value in (result.structured_content or {}).items()}

    def _no_gauges(self, why: str) -> dict[str, float]:
        """Warn that the gauges failed, and do not ask for them again: each call that hangs keeps a thread."""
        self._gauges = None
        text = f"environment {self.name}: gauges() {why}; its numbers are no longer logged; fix: correct it"
        notify(logger, f"gauges of {self.name}", text)
        return {}

    async def _connect(self, reopens: bool = False) -> Connection:
        limits = self.config.timeout_seconds, self._log, reopens, self.result_bytes
        connection = Connection(self.name, self._target, *limits, self._note_list)
        try:
            await connection.open()
        except BaseException:
            await connection.close()
            raise
        return connection

    def _instances(self) -> Pool[Connection]:
        async def make() -> Connection:
            while self._first:
                first = self._first.pop()
                if first.alive:
                    return first
                await first.close()
            return await self._connect()

        config, changes = self.config.pool, dict[str, int]()
        if config.capacity is None and self.config.url is None:
            changes["capacity"] = max(1, self._memory // self._each)
        if (self.environment is None or self.config.has_folders) and config.max_uses is None:
            changes["max_uses"] = 1
            if config.warm is None and self.config.url is None:
                changes["warm"] = min(_SPARES, changes.get("capacity", _SPARES), config.capacity or _SPARES)
        config = config.model_copy(update=changes)
        if self.config.url is None:
            self._log_processes(config.capacity)
        return Pool(f"tool server {self.name}", make, config, healthy=Connection.answers, retire=self._retire)

    async def _retire(self, connection: Connection) -> None:
        """Close a connection. If its process took more memory than assumed, lower the pool's capacity."""
        self._ended += 1
        changed = [file for file, before in self._files.items() if _state_of(file) != before]
        if changed and self._ended > 1:
            self._files = {}
            text = f"tool server {self.name}: chains have changed {changed[0]}, and each sees what the others wrote"
            fix = f"write {CHAIN} in place of its folder, and name that as `workspace`; or, if meant, isolation: shared"
            notify(logger, f"files of {self.name}", f"{text}; fix: {fix}")
        if connection.pid is not None and connection.alive:
            taken = await asyncio.to_thread(memory_of, connection.pid)
            if taken > self._each:
                self._each = taken
                if self._pool is not None and self.config.pool.capacity is None:
                    self._pool.capacity = max(1, self._memory // taken)
                    self._pool.advance()
                    self._log_processes(self._pool.capacity)
        await connection.close()

    def _log_processes(self, capacity: int | None) -> None:
        record = {"server": self.name, "processes": capacity, "mebibytes_each": self._each >> 20}
        self._log({"event": "tool_server_isolated", **record})

    def _note_list(self, tools: Sequence[Tool]) -> dict[str, str]:
        """Compare a list of tools with that of the run. Return the differences by name, and warn about them."""
        if self._listed is None:
            self._listed = {tool.name: tool for tool in reversed(tools)}  # the first of several with one name
            return {}
        now = {tool.name: tool for tool in reversed(tools) if tool.name}
        used = {tool.name for tool in (*self.tools, *self.hidden.values())}
        changes = {name: "is gone" for name in used if name not in now}
        for name in used & now.keys():
            if now[name].input_schema != self._listed[name].input_schema:
                changes[name] = "has another schema"
        new = [name for name in now if name not in self._listed and self._is_for_models(name)]
        if changes or new:
            parts = [f"{name} {change}" for name, change in sorted(changes.items())]
            parts += [f"{name} is new" for name in new]
            text = f"tool server {self.name} changed its tools: {', '.join(parts)}"
            why = "the run keeps the tools that it began with, which are part of its prompts"
            notify(logger, f"tools of {self.name}", f"{text}; {why}; fix: start it again to use the new ones")
        return changes

    def _is_for_models(self, name: str) -> bool:
        return (self.config.allow is None or name in self.config.allow) and name not in self.config.deny

    def _read(self, tools: Sequence[Tool]) -> None:
        listed = {tool.name: tool for tool in reversed(tools)}
        listed = {tool.name: listed[tool.name] for tool in tools}
        nameless = listed.pop("", None)
        if not listed:
            notify(logger, f"tools of {self.name}", f"tool server {self.name} lists no tools")
        counts = Counter(tool.name for tool in tools)
        if twice := [name for name, count in counts.items() if count > 1 and self._is_for_models(name)]:
            text = f"tool server {self.name} lists several tools with the name {', '.join(twice)}; the first is used"
            notify(logger, f"names of {self.name}", text)
        roles = {(tool.meta or {}).get(ROLE_KEY): tool.name for tool in tools}
        self._gauges = roles.get("gauges")
        declared = "reset" in roles  # a server of ours declares that it is an environment
        if self.environment is None and declared:
            given = {role: roles.get(role) for role in ("reset", "reward", "close")}
            self.environment = EnvironmentTools.model_validate(given)
        if declared:  # its reset waits for an instance
            self.reset_seconds += self.config.pool.wait_seconds
        for role in ("reset", "reward", "close"):
            if (tool := getattr(self.environment, role, None)) is None:
                continue
            if tool not in listed:
                problem = f"the server has no tool {tool!r}, it offers {', '.join(listed) or 'none'}"
                fix = "name one of them" if role == "reset" else "set it to null"
                raise ValueError(f"mcp_servers.{self.name}.environment.{role}: {problem}; {fix}")
            self.hidden[role] = listed[tool]
        if declared and "take_images" in roles:
            self.hidden["take_images"] = listed[roles["take_images"]]
        hidden = {tool.name for tool in self.hidden.values()} | {self._gauges}
        seen = {name: tool for name, tool in listed.items() if name not in hidden}
        section, offered, allow = f"mcp_servers.{self.name}", ", ".join(seen) or "none", self.config.allow
        for field in ("allow", "deny"):
            if unknown := [name for name in getattr(self.config, field) or () if name not in seen]:
                problem = f"the server has no tool {unknown[0]!r} for models, it offers {offered}"
                raise ValueError(f"{section}.{field}: {problem}; name one of them")
        self.tools = [tool for name, tool in seen.items() if self._is_for_models(name)]
        if seen and not self.tools:
            problem = f"it leaves none of the server's tools ({offered}) for models"
            field = "deny" if allow is None else "allow"
            raise ValueError(f"{section}.{field}: {problem}; name one, or remove the server")
        for tool in (*self.tools, *([nameless] if nameless is not None and allow is None else [])):
            if repair := (tool.meta or {}).get(REPAIR):
                text = f"tool server {self.name}: the tool {tool.name}".rstrip()
                notify(logger, f"list of {self.name}", f"{text} {repair}" + ("" if tool.name else "; it is left out"))
