"""A server on the MCP SDK whose tools change while it runs, announced with each protocol revision."""

import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("changing")


def grown() -> str:
    return "grown"


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool."""
    server.add_tool(grown)
    await context.notify_tools_changed()
    await context.session.send_tool_list_changed()
    return "more"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
