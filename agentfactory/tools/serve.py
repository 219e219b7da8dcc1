"""Serve tools over MCP: `python -m agentfactory.tools.serve FILE.py | FILE.py:NAME | PREBUILT ...`, on stdio until
stdin ends, or with `--http PORT` on 127.0.0.1 until a signal; it prints `ready http://127.0.0.1:PORT/mcp`."""

from agentfactory.base.user_code import import_path

if __name__ == "__main__":
    import_path.start_folder_last()

import argparse
import json
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import anyio
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from pydantic import ValidationError

from agentfactory.base.http import http_server
from agentfactory.base.processes import parent_watch
from agentfactory.base.config import PoolConfig
from agentfactory.tools.environments.environment import check_machine_for, is_environment
from agentfactory.base.errors import SettingError
from agentfactory.base.http.key_guard import KeyGuard, listen, server_key
from agentfactory.tools.mcp_servers.own_server import build_server
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.tool import is_tool
from agentfactory.base.user_code.loading import UserCodeError, load_module, load_object

IDLE_SECONDS = 900.0
"""Seconds without a call after which an HTTP server reclaims a chain's instance."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m agentfactory.tools.serve") -> None:
    """Serve by the command line `arguments` of the command `prog`. Exit with status 2 if something cannot be served."""
    parser = command_line(prog)
    options = parser.parse_args(arguments)
    for option in ("idle_seconds", "api_key_env") if options.http is None else ():
        if getattr(options, option) is not None:
            parser.error(f"{_flag(option)}: needs --http, because a stdio server ends with its client; remove it")
    fields = {name: getattr(options, name) for name in PoolConfig.model_fields}
    try:
        pool = PoolConfig.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        parser.error(f"{_flag(str(fault['loc'][0]))}: {fault['msg']}, got {fault['input']}")
    idle_seconds = None if options.http is None else options.idle_seconds or IDLE_SECONDS
    import_path.append_folders([Path.cwd()])
    try:
        with redirect_stdout(sys.stderr):  # stdout carries the protocol
            objects = [found for reference in options.objects for found in _load(reference)]
            given = dict(map(_option, options.option))
            server = build_server(objects, pool=pool, options=given, idle_seconds=idle_seconds)
            for found in filter(is_environment, objects):
                check_machine_for(found, given)
    except (UserCodeError, TypeError, SettingError) as error:
        parser.error(str(error))
    if isinstance(server, MCPServer):
        server = server._lowlevel_server
    if options.http is None:
        serve_stdio(server)
        return
    try:
        serve_http(server, options.http, options.api_key_env)
    except SettingError as error:
        parser.error(str(error))


def objects_in(path: Path) -> list[Any]:
    """Return the public `@tool` functions, Environment classes and MCP servers of a file. Raises UserCodeError."""
    if not path.is_file():
        raise UserCodeError(f"there is no file {path}", "name an existing one")
    module = load_module(path.resolve())
    found = {id(value): value for name, value in vars(module).items() if name[0] != "_" and _is_served(value, module)}
    if not found:
        problem = f"{path} has no @tool function, no Environment class and no MCP server"
        raise UserCodeError(problem, "put @tool above a function's definition")
    return list(found.values())


def _is_served(value: Any, module: Any) -> bool:
    is_ours = is_tool(value) or is_environment(value)
    return isinstance(value, (Server, MCPServer)) or (is_ours and value.__module__ == module.__name__)


def _load(reference: str) -> list[Any]:
    if reference.endswith(".py"):
        return objects_in(Path.cwd() / reference)
    return [load_object(reference, Path.cwd(), prebuilt())]


def command_line(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Serve tools over MCP, on stdio or over HTTP.")
    named = f"@tool functions, an Environment class, an MCP server; prebuilt: {', '.join(prebuilt())}"
    parser.add_argument("objects", nargs="+", metavar="FILE.py[:NAME]", help=named)
    parser.add_argument("--http", type=int, metavar="PORT", help="serve streamable HTTP on 127.0.0.1; 0: a free port")
    key = "over HTTP, environment variable with the key; default: a random key"
    parser.add_argument("--api-key-env", metavar="NAME", help=key)
    option = "argument of the Environment's constructor"
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=option)
    for name, field in PoolConfig.model_fields.items():
        kind, metavar = (float, "SECONDS") if "seconds" in name else (int, "N")
        told = (field.description or "").replace("null:", "default:")
        parser.add_argument(_flag(name), type=kind, metavar=metavar, help=told)
    idle = "over HTTP, time without a call after which a chain counts as gone; must exceed the longest call; default: "
    parser.add_argument("--idle-seconds", type=float, metavar="SECONDS", help=f"{idle}{IDLE_SECONDS:g}")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise TypeError(f"--option: got {text!r}; write it as NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def serve_stdio(server: Server[Any]) -> None:
    """Serve on stdin and stdout until stdin ends; then end the process, even if a tool hangs."""
    threading.Thread(target=_exit_with_parent, args=(os.dup(sys.stdin.fileno()),), daemon=True).start()

    async def run() -> None:
        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())

    anyio.run(run)


def _exit_with_parent(stdin: int) -> None:
    """Exit two seconds after the other end of `stdin` was closed, even if a tool blocks the event loop."""
    poll = select.poll()
    poll.register(stdin, 0)  # reports only hang-ups
    poll.poll()
    time.sleep(2.0)
    os._exit(1)


def serve_http(server: Server[Any], port: int, api_key_env: str | None = None) -> None:
    """Serve streamable HTTP under /mcp on 127.0.0.1 until SIGINT or SIGTERM. Raises SettingError for port or key."""
    parent_watch.follow_parent()
    listener = listen("127.0.0.1", port, "--http")
    # `_meta` identifies chains, so HTTP sessions would only have to be stored and expired
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    port = listener.getsockname()[1]
    with server_key("127.0.0.1", port, api_key_env) as (key, where):
        print(f"ready http://127.0.0.1:{port}/mcp\n{where}", flush=True)
        http_server.serve_http(KeyGuard(app, key), listener)


if __name__ == "__main__":
    main()
