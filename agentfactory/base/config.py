"""Recipe sections of the tools package: `tools:`, `mcp_servers:` and `limits:`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from agentfactory.base.errors import Fault, SettingError, refuse, short
from agentfactory.base.messages import LARGEST_REWARD

PositiveInt = Annotated[int, Field(gt=0)]
Options = Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)]
"""Arguments by name. null means none, so a recipe can clear inherited arguments."""
RESULT_BYTES = 1 << 20
"""1 MiB; see LimitsConfig.result_bytes."""
CHAIN = "${chain}"
"""In `args`, `env` and `cwd` of an MCP server: the folder of the chain."""
WAYS = ("command", "url", "module", "container")
"""The mutually exclusive fields that define how an MCP server is started or reached."""
PositiveFloat = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=0, le=LARGEST_REWARD)]


class Section(BaseModel):
    """Base of recipe sections: unknown keys and infinite numbers are errors; a field's docstring describes it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def _complete(self) -> None:
        """Set fields whose defaults follow from other fields."""

    def _faults(self) -> Iterable[Fault]:
        """Yield the faults of fields that do not agree with each other."""
        return ()

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        self._complete()
        refuse(self._faults())
        return self


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a section's fields by their names in a recipe; one that is a Python keyword is an alias."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names; an empty mapping is a leaf."""
    if isinstance(data, dict) and data:
        return {name: leaf for key, value in data.items() for name, leaf in leaves(value, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): data}


TypedOptions = Annotated[Any, Field(validate_default=True)]


class Choice(Section):
    """Base of sections that select a variant by name; `options: TypedOptions = None` holds the variant's options."""

    chooser: ClassVar[str]
    """Name of the selecting field, which must be declared before `options`."""
    kinds: ClassVar[Mapping[str, type[Section]]]
    """Variant -> type of its options. Unlisted variants take no options; `FILE.py:NAME` takes any."""

    @classmethod
    def choice(cls, fields: Mapping[str, Any]) -> str | None:
        """Return the variant that `fields` select; None if unknown."""
        found = fields.get(cls.chooser)
        return None if found is None else str(found)

    @classmethod
    def options_type(cls, choice: str) -> type[Section] | None:
        """Return the options type of the variant `choice`; None for a user's `FILE.py:NAME`."""
        return None if ".py:" in choice else cls.kinds.get(choice, NoOptions)

    @field_validator("options", mode="before", check_fields=False)
    @classmethod
    def _read_options(cls, given: Any, info: ValidationInfo) -> Any:
        choice = cls.choice(info.data)
        if choice is None:
            return given  # the selecting field is invalid, and reported separately
        kind, given = cls.options_type(choice), {} if given is None else given
        if kind is None:
            if not isinstance(given, dict):
                raise SettingError("", f"got {short(given)}", "write arguments by name")
            return given
        if isinstance(given, Section):
            given = given.model_dump(mode="json", exclude_unset=True)
        # validate as strictly as the recipe itself
        return kind.model_validate_json(json.dumps(given, default=str), strict=True)


class NoOptions(Section):
    """Options of a variant that takes none."""


class EnvironmentTools(Section):
    """Names of the tools through which an MCP server acts as an environment. The model never sees them."""

    reset: str = "reset"
    """Called once per chain with the task's fields; the returned text, which may be empty, opens the chain."""
    reward: str | None = "reward"
    """Called once when the chain has ended; returns a number or an object with `reward`. null if the server has no such
    tool; the recipe's `rewards` then judge the chain."""
    close: str | None = "close"
    """Called when the chain releases the environment; null if the server has no such tool."""


class Isolation(StrEnum):
    """The server resource that each chain gets exclusively."""

    SHARED = "shared"
    """Nothing: all chains use one connection. AgentFactory's own servers distinguish chains by a key in each call."""
    SESSION = "session"
    """An HTTP session (of protocol versions before 2026-07-28, which have sessions)."""
    PROCESS = "process"
    """A process or a container."""


class PoolConfig(Section):
    """Pool of instances of an environment, or of a server that is not shared. Each instance serves one chain at a
    time."""

    wait_seconds: ClassVar[float] = 600.0
    """Seconds that a chain waits for an instance before it ends as tool_infrastructure."""

    capacity: PositiveInt | None = None
    """Maximum number of concurrent instances; further chains wait. null: one per live chain; for server processes, as
    many as fit into half of the free memory, at 75 MiB each, or the size of the largest ended process if more."""
    create_seconds: PositiveFloat = 300.0
    """Time limit of creating an instance, such as the constructor of an Environment."""
    warm: int | None = Field(default=None, ge=0)
    """Number of instances kept ready: created at the start, and replaced before the next chain needs one. null: 2 for
    processes that serve one chain each, else 0."""
    max_uses: PositiveInt | None = None
    """Number of chains after which an instance is replaced; 1: each chain gets a new one."""


class McpServerConfig(Section):
    """One MCP server, in the format of the usual `mcpServers` block: `command` (stdio), `url` (streamable HTTP),
    `module` (in this process) or `container` (docker or podman)."""

    command: str | None = None
    """Program to start; it speaks MCP on stdin and stdout."""
    args: list[str] = []
    """Arguments of `command`, or of the container's program. `${chain}` here, in `env` and in `cwd` stands for the
    chain's own folder."""
    env: dict[str, str] = {}
    """Environment variables of `command`, in addition to the few that the MCP SDK passes. `${NAME}` expands to a
    variable of this process, so a recipe refers to secrets without containing them."""
    cwd: str | None = None
    """Folder in which `command` starts; default: the recipe's folder."""
    workspace: str | None = None
    """Folder that is copied into each chain's folder (`${chain}`) before the chain begins."""
    url: str | None = None
    """Address of a running streamable-HTTP server, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = {}
    """HTTP headers sent to `url`; `${NAME}` as in `env`."""
    module: str | None = None
    """`FILE.py:NAME` of an `Environment` class, a `@tool` or an `MCPServer` object, or the name of a prebuilt one. It
    is served in this process."""
    options: dict[str, Any] = {}
    """Arguments for the constructor of the `Environment` class of `module`."""
    container: str | None = None
    """Image to run with docker or podman; its program speaks MCP on stdin and stdout."""
    allow: list[str] | None = None
    """Tools of the server to offer to the model; null: all."""
    deny: list[str] = []
    """Tools to hide from the model."""
    prefix: str = ""
    """Prefix of every tool name, for servers whose tool names clash."""
    isolation: Isolation | None = None
    """The resource that each chain gets exclusively: none (shared), a session, or a process. null: a process for a
    `command` or a `container` that is not AgentFactory's own; shared for anything else. `shared`
    suits stateless servers, and saves memory and time."""
    pool: PoolConfig = PoolConfig()
    """Pool of instances of the environment, or of a server that is not shared."""
    environment: EnvironmentTools | None = None
    """Set this (an empty mapping uses the default names) if the server is an environment with per-chain state. A
    `module` that names an `Environment` class always is one."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit of one call; an environment's reset has it once the chain has an instance."""

    @model_validator(mode="before")
    @classmethod
    def _take_transport(cls, given: Any) -> Any:
        """Remove the redundant `type` that other programs write beside `command` or `url`."""
        if not isinstance(given, dict):
            return given
        fields = dict(given)
        kind, way = fields.pop("type", None), next((way for way in WAYS if fields.get(way)), None)
        fitting = {"command": ("stdio",), "url": ("http", "streamable-http")}
        if kind is not None and way is not None and kind not in fitting.get(way, ()):
            raise SettingError("type", f"got {short(kind)} with {way}", "remove it")
        return fields

    def _faults(self) -> Iterator[Fault]:
        given = [name for name in WAYS if getattr(self, name)]
        if len(given) != 1:
            yield "", f"got {given or 'none'}", f"give exactly one of {', '.join(WAYS)}"
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield "url", f"got {self.url!r}", "write an address such as http://127.0.0.1:8000/mcp"
        way = given[0]
        owners = {"args": ("command", "container"), "env": ("command", "container"), "cwd": ("command",)}
        owners |= {"headers": ("url",), "options": ("module",)}
        for name, those in owners.items():
            if (value := getattr(self, name)) and way not in those:
                # of a mapping only the keys: values may be secrets
                got = short([*value] if isinstance(value, dict) else value)
                yield name, f"got {got}: it applies to {' and '.join(those)}, and this server uses {way}", "remove it"
        possible = {"command": "process", "container": "process", "url": "session"}.get(way)
        if self.isolation not in (None, Isolation.SHARED) and self.isolation != possible:
            advice = f"use shared or {possible}" if possible else "use shared; each chain has an instance of its own"
            yield "isolation", f"got {self.isolation} with {way}", advice
        yield from self._faults_of_folders()

    def _faults_of_folders(self) -> Iterator[Fault]:
        others = {"command": self.command, "url": self.url, "container": self.container, "workspace": self.workspace}
        # the rest of a header may be a secret, so it is not quoted
        others |= {f"headers.{key}": CHAIN for key, value in self.headers.items() if CHAIN in value}
        for field, text in others.items():
            if CHAIN in (text or ""):
                problem = f"got {short(text)}: only args, env and cwd of a `command` may refer to {CHAIN}"
                yield field, problem, "remove it there"
        if self.workspace and not (self.command and self.has_folders):
            problem = f"got {short(self.workspace)}, but no chain has a folder: no `command` refers to {CHAIN}"
            yield "workspace", problem, f"put {CHAIN} into args, env or cwd of a `command`, or remove it"
        if not self.has_folders:
            return
        if self.command is None:
            problem = f"got {short(self.args)}: {CHAIN} is a folder of this machine"
            yield "args", problem, "use `command`: docker run -v ..."
        if self.isolation is Isolation.SHARED:
            yield "isolation", f"got 'shared', but {CHAIN} needs a process for each chain", "remove it"
        if self.pool.max_uses not in (None, 1):
            problem = f"got {self.pool.max_uses}, but a process belongs to one chain, as its folder ({CHAIN}) does"
            yield "pool.max_uses", problem, "remove it"
        if CHAIN in (self.cwd or "") and not f"{self.cwd}/".startswith(f"{CHAIN}/"):
            yield "cwd", f"got {self.cwd!r}", f"write {CHAIN}, or {CHAIN}/FOLDER"

    @property
    def has_folders(self) -> bool:
        """True if each chain has its own folder."""
        return any(CHAIN in text for text in (*self.args, *self.env.values(), self.cwd or ""))


class Limit(StrEnum):
    """A limit on a chain's calls. The members are in the order of the checks."""

    CALLS_PER_TURN = "calls_per_turn"
    CALLS = "calls"
    CALLS_PER_TOOL = "calls_per_tool"
    COST = "cost"
    TOOL_SECONDS = "tool_seconds"
    CALLS_PER_SECOND = "calls_per_second"
    SECONDS_PER_CALL = "seconds_per_call"
    RESULT_BYTES = "result_bytes"
    RESULT_TOKENS = "result_tokens"
    IMAGES = "images"


class BreachConfig(Section):
    """The consequence of exceeding a limit."""

    action: Literal["tell", "stop"] = "tell"
    """tell: the model reads an explanation instead of the result, and the chain continues. stop: the chain ends as
    tool_limit."""


class LimitsConfig(Section):
    """Limits on a chain's use of tools. Limits of turns, tokens and time are in `rollout:`. null: no limit."""

    result_bytes: ClassVar[int] = RESULT_BYTES
    """Maximum bytes of one result's text, in UTF-8. A longer one is cut in the middle on arrival, before any other
    processing, with a marker that the model sees. This bounds the worker's memory; `result_tokens` bounds the
    context."""

    calls_per_turn: PositiveInt | None = None
    """Calls in one assistant turn."""
    calls: PositiveInt | None = None
    """Calls in the whole chain."""
    calls_per_tool: dict[str, PositiveInt] = {}
    """Tool -> calls in the whole chain."""
    cost: PositiveFloat | None = None
    """Total cost of the chain's calls, in the unit of `cost_per_call`."""
    cost_per_call: dict[str, PositiveFloat] = {}
    """Tool -> cost of one call, in dollars, for example; other tools are free."""
    tool_seconds: PositiveFloat | None = None
    """Total running time of the chain's calls, in seconds; concurrent calls count once."""
    calls_per_second: dict[str, PositiveFloat] = {}
    """Tool -> calls per second over all chains. Calls above the rate wait; with an entry in on_breach they are refused
    instead."""
    seconds_per_call: dict[str, PositiveFloat] = {}
    """Tool -> time limit of a call in seconds; for other tools, the server's timeout_seconds."""
    result_tokens: PositiveInt | None = None
    """Maximum tokens of one result; a longer one is cut in the middle, with a marker that the model sees."""
    images: PositiveInt | None = None
    """Images in the whole chain, including those of the task; further images are replaced with a text for the
    model."""
    on_breach: dict[Limit, BreachConfig] = {}
    """Limit -> consequence of exceeding it. Default of a limit without an entry: `tell`."""

    def _faults(self) -> Iterator[Fault]:
        for limit in self.on_breach:
            if not getattr(self, limit):
                yield f"on_breach.{limit}", "there is no such limit", f"set limits.{limit}, or remove the entry"
        if self.cost is not None and not self.cost_per_call:
            yield "cost", f"got {self.cost:g}, but no call costs anything", "set limits.cost_per_call"


class ToolsRecipe(Section):
    """The recipe fields that the tools package reads."""

    import_path: list[Path] = []
    """Folders from which user code can import; installed packages take precedence. A file can also import from its own
    folder. Default: the folders of the recipe's files."""
    tools: list[str] = []
    """`FILE.py:NAME` of `@tool` functions and `Environment` classes, and names of prebuilt ones, served in this process
    under the name NAME."""
    mcp_servers: dict[str, McpServerConfig] = {}
    """Further MCP servers, by name."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on a chain's use of tools."""
    env: list[str] = []
    """Environment variables that tools, rewards, worlds and `prepare` may read, such as that of an API key. Their
    processes get no others, except settings of the system and of libraries (PATH, HOME, OMP_NUM_THREADS, ...)."""

    def longest_call(self) -> tuple[float, str]:
        """Return the longest time limit in seconds of a call of user code in this process, and its setting."""
        usual = McpServerConfig.model_fields["timeout_seconds"].default
        own = [server.timeout_seconds for server in self.mcp_servers.values()]
        return max([*own, *([usual] if self.tools else [])], default=usual), "timeout_seconds"
