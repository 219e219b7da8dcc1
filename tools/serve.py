"""Serve tools out of a file over MCP: `python -P -m tools.serve FILE.py:NAME [FILE.py:NAME ...] [--http PORT]`.

On stdio by default, until stdin ends. With `--http`, streamable HTTP on 127.0.0.1 (port 0 takes a free one), until
SIGINT or SIGTERM; the line `ready http://127.0.0.1:PORT/mcp` on stdout says that it listens.
"""

import argparse
import os
import select
import socket
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

from tools import lifeline
from tools.mcp_server import build_server
from tools.user_code import UserCodeError, load_object

_EXIT_SECONDS = 2.0
"""How long a stdio server may take to end after its parent is gone."""


def main() -> None:
    """Parse the command line and serve; a file that cannot be served ends with status 2 and the reason."""
    parser = argparse.ArgumentParser(prog="python -P -m tools.serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("objects", nargs="+", metavar="FILE.py:NAME", help="@tool functions, an Environment class")
    parser.add_argument("--http", type=int, metavar="PORT", help="serve streamable HTTP on 127.0.0.1; 0: a free port")
    options = parser.parse_args()
    try:
        with redirect_stdout(sys.stderr):  # stdout carries the protocol
            server = build_server([load_object(reference, Path.cwd()) for reference in options.objects])
    except (UserCodeError, TypeError) as error:
        parser.error(str(error))
    if isinstance(server, MCPServer):
        server = server._lowlevel_server
    if options.http is None:
        serve_stdio(server)
    else:
        serve_http(server, options.http)


def serve_stdio(server: Server[Any]) -> None:
    """Serve on stdin and stdout until stdin ends; then the process ends, also with a tool that hangs."""
    threading.Thread(target=_exit_with_parent, args=(os.dup(sys.stdin.fileno()),), daemon=True).start()

    async def run() -> None:
        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())

    anyio.run(run)


def _exit_with_parent(stdin: int) -> None:
    """End the process some seconds after the other end of `stdin` was closed, for a tool may block the event loop."""
    poll = select.poll()
    poll.register(stdin, 0)  # reports hang-ups only
    poll.poll()
    time.sleep(_EXIT_SECONDS)
    os._exit(1)


def serve_http(server: Server[Any], port: int) -> None:
    """Serve streamable HTTP under /mcp on 127.0.0.1 until SIGINT or SIGTERM."""
    lifeline.follow_parent()
    # the protocol is named because asyncio turns Nagle's algorithm off only for sockets that name it: 40 ms a call
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    # chains are told apart by `_meta`, so that HTTP sessions would only have to be kept and expired
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    print(f"ready http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
