"""A typical third-party stateful HTTP server, which identifies its clients only by their sessions."""

import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sessions", log_level="WARNING")
words: dict[str, str] = {}


def session(context: Context[Any]) -> str:
    return str(context.request_context.request.headers["mcp-session-id"])


@server.tool()
async def write(word: str, context: Context[Any]) -> str:
    words[session(context)] = word
    return "wrote"


@server.tool()
async def read(context: Context[Any]) -> str:
    return words.get(session(context), "nothing")


if __name__ == "__main__":
    # argument: a port (0: a free one)
    app = server.streamable_http_app()
    config = uvicorn.Config(app, port=int(sys.argv[1]), log_level="warning", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    sockets = [config.bind_socket()]
    sockets[0].listen(1024)
    print(f"ready http://127.0.0.1:{sockets[0].getsockname()[1]}/mcp", flush=True)
    running.run(sockets=sockets)
