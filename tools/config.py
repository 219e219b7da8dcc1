"""The part of a recipe that the tools package owns: `tools:` and `mcp_servers:`."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every recipe section: unknown keys are errors, a field's docstring is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EnvironmentTools(Section):
    """Names of the tools by which an MCP server acts as an environment. The model never sees them."""

    reset: str = "reset"
    """Called once per chain with the task's fields; its text opens the chain (may be empty)."""
    reward: str = "reward"
    """Called once when the chain has ended; returns a number or an object with `reward`."""
    close: str | None = "close"
    """Called when the chain lets go of the environment; null when the server has no such tool."""


class McpServerConfig(Section):
    """One MCP server, in the shape of the usual `mcpServers` block: `command` (stdio), `url` (streamable HTTP)
    or `module` (in this process)."""

    command: str | None = None
    """Program to start; it speaks MCP on stdin and stdout."""
    args: list[str] = []
    """Arguments of `command`."""
    env: dict[str, str] = {}
    """Environment variables of `command`, beyond the few that the MCP SDK passes on."""
    cwd: str | None = None
    """Folder in which `command` starts; default: the recipe's folder."""
    url: str | None = None
    """Address of a running streamable-HTTP server, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = {}
    """HTTP headers sent to `url`."""
    module: str | None = None
    """`FILE.py:NAME` of an `Environment` class, a `@tool` or an `MCPServer` object, served in this process."""
    environment: EnvironmentTools | None = None
    """Set (an empty mapping takes the usual names) when the server is an environment with per-chain state.
    A `module` that names an `Environment` class always is one."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit of one call."""

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> "McpServerConfig":
        given = [name for name in ("command", "url", "module") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of command, url, module; got {given or 'none'}")
        return self


class ToolsRecipe(Section):
    """The recipe fields that the tools package reads."""

    tools: list[str] = []
    """`FILE.py:NAME` of `@tool` functions and `Environment` classes, served in process under the name NAME."""
    mcp_servers: dict[str, McpServerConfig] = {}
    """Further MCP servers by name."""
