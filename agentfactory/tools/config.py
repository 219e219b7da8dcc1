"""The part of a recipe that the tools package owns: `tools:`, `mcp_servers:` and `limits:`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agentfactory.tools.errors import SettingError

PositiveInt = Annotated[int, Field(gt=0)]
Options = Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)]
"""Arguments by name; null is none, so that a recipe can take back what it extends."""
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every recipe section: unknown keys are errors, a field's docstring is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EnvironmentTools(Section):
    """Names of the tools by which an MCP server acts as an environment. The model never sees them."""

    reset: str = "reset"
    """Called once per chain with the task's fields; its text opens the chain (may be empty)."""
    reward: str | None = "reward"
    """Called once when the chain has ended; returns a number or an object with `reward`. null when the server has no
    such tool: then the recipe's `rewards` judge."""
    close: str | None = "close"
    """Called when the chain lets go of the environment; null when the server has no such tool."""


class Isolation(StrEnum):
    """What a chain has of a server for itself."""

    SHARED = "shared"
    """Nothing: all chains use one connection. Our own servers tell chains apart by a key in each call."""
    SESSION = "session"
    """An HTTP session (of the protocol before 2026-07-28, which has them)."""
    PROCESS = "process"
    """A process, or a container."""


class PoolConfig(Section):
    """Instances of an environment (or of a server that is not shared), each of which serves one chain at a time."""

    capacity: PositiveInt | None = None
    """Most instances at a time; further chains wait. null: one for each chain that is alive."""
    wait_seconds: PositiveFloat = 600.0
    """How long a chain waits for an instance; then it ends as tool_infrastructure."""
    warm: int = Field(default=0, ge=0)
    """Instances that stand ready from the start, and are made anew ahead of the chains that will take them."""
    max_uses: PositiveInt | None = None
    """Chains after which an instance is replaced; 1: each chain gets a new one."""
    max_seconds: PositiveFloat | None = None
    """Age at which an instance is replaced, once its chain has let go of it."""


class McpServerConfig(Section):
    """One MCP server, in the shape of the usual `mcpServers` block: `command` (stdio), `url` (streamable HTTP),
    `module` (in this process) or `container` (docker or podman)."""

    type: Literal["stdio", "http", "streamable-http"] | None = None
    """What other programs write beside `command` or `url`; it has to agree with them."""
    command: str | None = None
    """Program to start; it speaks MCP on stdin and stdout."""
    args: list[str] = []
    """Arguments of `command`, or of the container's program."""
    env: dict[str, str] = {}
    """Environment variables of `command`, beyond the few that the MCP SDK passes on. `${NAME}` stands for a variable
    of this process: a recipe refers to a secret and never holds it."""
    cwd: str | None = None
    """Folder in which `command` starts; default: the recipe's folder."""
    url: str | None = None
    """Address of a running streamable-HTTP server, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = {}
    """HTTP headers sent to `url`; `${NAME}` as in `env`."""
    module: str | None = None
    """`FILE.py:NAME` of an `Environment` class, a `@tool` or an `MCPServer` object, served in this process, or the name
    of a prebuilt one."""
    options: dict[str, Any] = {}
    """Arguments with which the `Environment` class of `module` is made."""
    container: str | None = None
    """Image that is run by docker or podman; its program speaks MCP on stdin and stdout."""
    allow: list[str] | None = None
    """The only tools of the server that the model sees; null: all."""
    deny: list[str] = []
    """Tools that the model does not see."""
    prefix: str = ""
    """Put before the name of each tool, where two servers have tools of the same name."""
    isolation: Isolation = Isolation.SHARED
    """What a chain has of the server for itself: nothing (shared), a session, or a process. Servers that keep state and
    are not ours need one of the latter."""
    pool: PoolConfig = PoolConfig()
    """Instances of the environment, or of a server that is not shared."""
    cache: int = Field(default=0, ge=0)
    """Results kept, by tool and arguments, of a server whose tools always answer the same; errors are not kept."""
    environment: EnvironmentTools | None = None
    """Set (an empty mapping takes the usual names) when the server is an environment with per-chain state.
    A `module` that names an `Environment` class always is one."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit of one call."""

    @model_validator(mode="after")
    def _fields_agree(self) -> "McpServerConfig":
        ways = ("command", "url", "module", "container")
        given = [name for name in ways if getattr(self, name)]
        if len(given) != 1:
            raise SettingError("", f"got {given or 'none'}", f"give exactly one of {', '.join(ways)}")
        way = given[0]
        if self.type is not None and way != ("command" if self.type == "stdio" else "url"):
            raise SettingError("type", f"got {self.type!r} with {way}", "remove it")
        owners = {"args": ("command", "container"), "env": ("command", "container"), "cwd": ("command",)}
        owners |= {"headers": ("url",), "options": ("module",)}
        for name, those in owners.items():
            if getattr(self, name) and way not in those:
                problem = f"it is for {' and '.join(those)}, and the server is given by {way}"
                raise SettingError(name, problem, "remove it")
        possible = {"command": "process", "container": "process", "url": "session"}.get(way)
        if self.isolation is not Isolation.SHARED and self.isolation != possible:
            advice = f"use shared or {possible}" if possible else "use shared; each chain has an instance of its own"
            raise SettingError("isolation", f"got {self.isolation} with {way}", advice)
        if self.cache and (self.environment is not None or self.isolation is not Isolation.SHARED):
            raise SettingError("cache", f"got {self.cache}, but the server keeps state per chain", "remove it")
        return self


class Limit(StrEnum):
    """What a chain's calls may reach, in the order in which it is checked."""

    CALLS_PER_TURN = "calls_per_turn"
    CALLS = "calls"
    CALLS_PER_TOOL = "calls_per_tool"
    COST = "cost"
    TOOL_SECONDS = "tool_seconds"
    CALLS_PER_SECOND = "calls_per_second"
    SECONDS_PER_CALL = "seconds_per_call"
    RESULT_TOKENS = "result_tokens"


class BreachConfig(Section):
    """What a breach of a limit leads to."""

    action: Literal["tell", "stop"] = "tell"
    """tell: the model reads in place of the result why there is none, and goes on. stop: the chain ends as
    tool_limit."""
    penalty: float = Field(default=0.0, ge=0)
    """Taken off the chain's reward at each breach."""


class LimitsConfig(Section):
    """Limits of what one chain may do with tools. Those of turns, tokens and time are in `rollout:`. null: no limit."""

    calls_per_turn: PositiveInt | None = None
    """Calls in one assistant turn."""
    calls: PositiveInt | None = None
    """Calls in the whole chain."""
    calls_per_tool: dict[str, PositiveInt] = {}
    """Tool -> calls in the whole chain."""
    cost: PositiveFloat | None = None
    """What the chain's calls may cost together, in the unit of `cost_per_call`."""
    cost_per_call: dict[str, PositiveFloat] = {}
    """Tool -> cost of one call, such as dollars; other tools are free."""
    tool_seconds: PositiveFloat | None = None
    """Seconds in which the chain's calls may run, all together; those that run side by side count once."""
    parallel_calls: PositiveInt | None = None
    """Calls of one turn that run at a time; the others wait for them."""
    calls_per_second: dict[str, PositiveFloat] = {}
    """Tool -> calls per second of all chains together. Calls wait for their time; with an entry in on_breach they are
    refused instead."""
    seconds_per_call: dict[str, PositiveFloat] = {}
    """Tool -> seconds that a call may take; of other tools the server's timeout_seconds."""
    result_tokens: PositiveInt | None = None
    """Tokens of one result; a longer one is cut in its middle, with a marker that the model sees."""
    on_breach: dict[Limit, BreachConfig] = {}
    """Limit -> what its breach leads to; a limit without an entry is told, and costs nothing."""

    @model_validator(mode="after")
    def _limits_can_be_reached(self) -> "LimitsConfig":
        for limit in self.on_breach:
            if not getattr(self, limit):
                raise SettingError(
                    f"on_breach.{limit}", "there is no such limit", f"set limits.{limit}, or remove the entry"
                )
        if self.cost is not None and not self.cost_per_call:
            raise SettingError("cost", f"got {self.cost:g}, but no call costs anything", "set limits.cost_per_call")
        return self


class ToolsRecipe(Section):
    """The recipe fields that the tools package reads."""

    import_path: list[Path] = []
    """Folders that user code imports from, behind all that is installed, as it does from the folder of its own file;
    default: the folders of the recipe's files."""
    tools: list[str] = []
    """`FILE.py:NAME` of `@tool` functions and `Environment` classes, and names of prebuilt ones, served in this process
    under the name NAME."""
    mcp_servers: dict[str, McpServerConfig] = {}
    """Further MCP servers by name."""
    limits: LimitsConfig = LimitsConfig()
    """What a chain may do with tools."""
