"""Resolves a recipe's MCP server entry on this machine, with secrets filled in."""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from agentfactory.tools.config import CHAIN, Isolation, McpServerConfig
from agentfactory.tools.containers import Container
from agentfactory.tools.import_path import own_python, user_folders
from agentfactory.tools.mcp_server import build_server
from agentfactory.tools.prebuilt import PREBUILT
from agentfactory.tools.user_code import load_object
from agentfactory.tools.workspaces import ChainProgram, check_template


@dataclass(frozen=True)
class HttpAddress:
    """A running streamable-HTTP server. `session`: the connection is to be a separate session."""

    url: str
    headers: dict[str, str]
    session: bool = False


Target = Server[Any] | MCPServer | StdioServerParameters | ChainProgram | Container | HttpAddress
"""The other end of a connection."""


def target_of(name: str, config: McpServerConfig, base: Path, result_bytes: int) -> Target:
    """Return the object, process, container or address that `config` names.

    `command: python` is this interpreter, and its modules (`-m`) import like user code; paths start at `base`. Our own
    servers in this process cut results to `result_bytes`.

    Raises:
        UserCodeError, TypeError: `module` cannot be loaded or served.
        ValueError: `env` or `headers` refer to an environment variable that is not set.
    """
    if config.module is not None:
        loaded = load_object(config.module, base, prebuilt=PREBUILT)
        return build_server([loaded], name, config.pool, config.options, result_bytes=result_bytes)
    if config.url is not None:
        headers = _expand(f"mcp_servers.{name}.headers", config.headers)
        return HttpAddress(config.url, headers, config.isolation is Isolation.SESSION)
    env = _expand(f"mcp_servers.{name}.env", config.env)
    if config.container is not None:
        return Container(name, config.container, config.args, env)
    assert config.command is not None
    cwd = Path(config.cwd) if config.cwd and config.cwd.startswith(CHAIN) else base / (config.cwd or ".")
    command, *args = _program(config.command, config.args, base if CHAIN in str(cwd) else cwd)
    program = StdioServerParameters(command=command, args=args, env=env, cwd=cwd)
    if not config.has_folders:
        return program
    template = base / config.workspace if config.workspace else None
    if template is not None:
        check_template(f"mcp_servers.{name}.workspace", template)
    return ChainProgram(program, template, base / config.keep_workspaces if config.keep_workspaces else None)


def _program(command: str, args: list[str], cwd: Path) -> list[str]:
    if command != "python":
        return [command, *args]
    if args[:1] != ["-m"]:
        return [sys.executable, *args]
    folders = json.dumps([*dict.fromkeys([str(cwd), *user_folders()])])
    return own_python("-m", "agentfactory.tools.run_module", folders, *args[1:])


def _expand(field: str, values: dict[str, str]) -> dict[str, str]:
    """Replace `${NAME}` with environment variables: a recipe refers to a secret and never contains it."""

    def expand(key: str, value: str) -> str:
        def variable(match: re.Match[str]) -> str:
            if match[0] == CHAIN and field.endswith(".env"):
                return match[0]
            if match[1] not in os.environ:
                raise ValueError(f"{field}.{key}: the environment variable {match[1]} is not set; export it")
            return os.environ[match[1]]

        return re.sub(r"\$\{(\w+)\}", variable, value)

    return {key: expand(key, value) for key, value in values.items()}
