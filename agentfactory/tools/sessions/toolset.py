"""`Toolset`: all tools of a recipe behind one interface, for the chains that call them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.config import McpServerConfig, ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec, properties_of, required_of
from agentfactory.base.processes.memory import memory_room
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.watch import limited, loop_watched
from agentfactory.tools.calls.argument_check import ArgumentCheck
from agentfactory.tools.calls.limits import Deadline
from agentfactory.tools.environments.environment import check_data_rows
from agentfactory.tools.mcp_servers.own_server import ROLE_KEY, build_server
from agentfactory.tools.mcp_servers.recipe_server import ToolServer
from agentfactory.tools.mcp_servers.server_connection import Log
from agentfactory.tools.mcp_servers.server_entry import target_of
from agentfactory.tools.sessions.tool_session import Route, ToolSession

logger = logging.getLogger(__name__)

_NAMED_PARTS = 8


@asynccontextmanager
async def open_toolset(
    recipe: ToolsRecipe, base: Path, log: Log = lambda record: None, objects: Sequence[Any] = (), processes: int = 1
) -> "AsyncIterator[Toolset]":
    """Open every tool and MCP server of `recipe`, with paths relative to `base`, and the tools `objects`; close them on
    exit. `log` gets records {"event": "tool_server_opened" | "_lost" | "_isolated", ...}; `processes` like this one
    share the memory. Raises UserCodeError, TypeError or ValueError for a wrong recipe, ToolInfrastructureError."""
    servers: dict[str, ToolServer] = {}
    most = recipe.limits.result_bytes
    programs = sum(1 for config in recipe.mcp_servers.values() if config.command or config.container)
    # memory for the processes of one server, if nothing else limits their number
    memory = memory_room() // 2 // processes // max(1, programs)

    def add(server: ToolServer) -> None:
        if server.name in servers:
            raise ValueError(f"two tool servers are called {server.name}: rename one in tools or mcp_servers")
        servers[server.name] = server

    for given in objects:
        name = str(getattr(given, "__name__", None) or getattr(given, "name", type(given).__name__))
        target = build_server([given], name, result_bytes=most)
        add(ToolServer(name, McpServerConfig(module=name), target, log, most))
    entries = [(reference.rpartition(":")[2], McpServerConfig(module=reference)) for reference in recipe.tools]
    for name, config in [*entries, *recipe.mcp_servers.items()]:
        add(ToolServer(name, config, target_of(name, config, base, most), log, most, memory))

    toolset: Toolset | None = None
    openings = [asyncio.create_task(server.open(), name=f"open {server.name}") for server in servers.values()]
    try:
        await asyncio.gather(*openings)
        toolset = Toolset(list(servers.values()))
        with loop_watched(partial(notify, logger)), limited(*recipe.longest_call()):
            yield toolset
    finally:
        for opening in openings:  # if one fails, the others are not needed
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        if toolset is not None:
            await toolset.closed()
        await asyncio.gather(*(server.close() for server in servers.values()))


class Toolset:
    """The tools of a recipe. `specs` describe them for the model, in the order of the recipe and its servers."""

    def __init__(self, servers: Sequence[ToolServer]) -> None:
        self._servers = servers
        self._routes: dict[str, Route] = {}
        self._of_user: dict[str, Route] = {}
        """Tools that the agent does not get."""
        self._closings: set[asyncio.Task[None]] = set()
        self.specs: list[ToolSpec] = []
        for server in servers:
            unchecked: dict[str, list[str]] = {}
            for tool in server.tools:
                name = server.config.prefix + tool.name
                if other := self._routes.get(name):
                    problem = f"the tool {name} is offered by {other.server.name} and by {server.name}"
                    raise ValueError(f"{problem}; remove one, or set mcp_servers.{server.name}.prefix")
                check = None if ROLE_KEY in (tool.meta or {}) else ArgumentCheck(tool.input_schema)
                if check is not None and check.unchecked:
                    unchecked[tool.name] = check.unchecked
                self._routes[name] = Route(server, tool.name, check)
                self.specs.append(ToolSpec(name, tool.description or "", tool.input_schema))
            if unchecked:
                parts = [f"{tool}: {part}" for tool, parts in unchecked.items() for part in parts]
                more = f", and {len(parts) - _NAMED_PARTS} more" if len(parts) > _NAMED_PARTS else ""
                text = f"tool server {server.name}: calls are not checked against unusable parts of schemas, which "
                text += f"models see unchanged: {', '.join(parts[:_NAMED_PARTS])}{more}"
                notify(logger, f"schemas of {server.name}", text)

    def give_to_user(self, names: Sequence[str]) -> list[ToolSpec]:
        """Take tools from the agent, and return them, for the simulated user. Raise SettingError for unknown names."""
        for number, name in enumerate(names):
            if name not in [*self._routes]:
                fix = f"use some of {', '.join(self._routes) or 'none'}"
                raise SettingError(f"rollout.user.options.tools.{number}", f"there is no tool {name!r}", fix)
            self._of_user[name] = self._routes.pop(name)
        given = [spec for spec in self.specs if spec.name in names]
        self.specs = [spec for spec in self.specs if spec.name not in names]
        return given

    @property
    def environments(self) -> list[str]:
        return [server.name for server in self._servers if server.environment]

    def harmless(self, reads: bool) -> list[ToolSpec]:
        """Return the tools declared non-destructive and confined: the read-only ones (`reads`), or the others."""
        said = {
            server.config.prefix + tool.name
            for server in self._servers
            for tool in server.tools
            if (hints := tool.annotations) and hints.open_world_hint is False
            if (hints.read_only_hint is True if reads else hints.destructive_hint is False and not hints.read_only_hint)
        }
        return [spec for spec in self.specs if spec.name in said]

    @property
    def isolation(self) -> list[str]:
        """Descriptions of a chain's isolation in each server outside this process."""
        return [server.isolation_text for server in self._servers if server.config.module is None]

    @property
    def why_chains_wait(self) -> dict[str, tuple[str, str]]:
        """Server with a process per chain -> the reason why chains wait for one, and the setting to change."""
        return {server.name: why for server in self._servers if (why := server.why_chains_wait) is not None}

    @property
    def judges(self) -> bool:
        return any("reward" in server.hidden for server in self._servers)

    @property
    def judges_predictions(self) -> bool:
        """True if an environment's reward reads the last message, so that a chain can succeed without a tool."""
        rewards = (server.hidden["reward"].input_schema for server in self._servers if "reward" in server.hidden)
        return any("prediction" in properties_of(schema) for schema in rewards)

    def takes(self, field: str) -> bool:
        resets = (server.hidden["reset"].input_schema for server in self._servers if server.environment)
        return any(field in properties_of(schema) for schema in resets)

    @property
    def needed(self) -> dict[str, str]:
        """Row field that a reset requires -> "the reset of SERVER"."""
        resets = {server.name: server.hidden["reset"].input_schema for server in self._servers if server.environment}
        return {field: f"the reset of {name}" for name, schema in resets.items() for field in required_of(schema)}

    def check_rows(self, tasks: Sequence[dict[str, Any]], section: str, has_rewards: bool) -> None:
        """Raise SettingError, with the row's number, if a row of `section` lacks a field that a reset needs, or an
        environment in this process refuses it. `has_rewards`: see Environment.check_data_row."""
        for field, who in self.needed.items():
            for number, task in enumerate(tasks, 1):
                if field not in task:
                    problem = f"{who} needs {field}, which row {number} lacks (it has {', '.join(task) or 'none'})"
                    fix = f"give every row this field, or rename one by {section}.columns"
                    raise SettingError(section, problem, fix)
        for server in self._servers:
            if (environment := server.environment_class) is not None:
                check_data_rows(environment, tasks, section, has_rewards)

    @asynccontextmanager
    async def chain(
        self, key: str, task: dict[str, Any], limit: Deadline | None = None
    ) -> "AsyncIterator[ToolSession]":
        """Open a session for `key`, with environments reset within `limit`. Raises ToolInfrastructureError."""
        session = ToolSession(key, self._servers, self._routes, self._of_user)
        try:
            await session.begin(task, limit)
            yield session
        finally:
            # in a separate task, which finishes even if the chain is cancelled again
            closing = asyncio.create_task(session.close(), name=f"end of chain {key}")
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
            await asyncio.shield(closing)

    def activity(self, key: str) -> str:
        """Return what the reset of the chain `key` waits for, such as "Hall.reset()"."""
        environments = [server for server in self._servers if server.environment]
        return ", ".join(server.activity(key) or f"the reset of {server.name}" for server in environments)

    async def gauges(self) -> dict[str, float]:
        """Return `environments/<server>/<gauge>` of every pool: see `Pool.gauges`."""
        answers = await asyncio.gather(*(server.gauges() for server in self._servers))
        found = [(server.name, answer) for server, answer in zip(self._servers, answers, strict=True)]
        return {f"environments/{name}/{key}": value for name, answer in found for key, value in answer.items()}

    async def closed(self) -> None:
        while self._closings:
            await asyncio.wait(self._closings)
