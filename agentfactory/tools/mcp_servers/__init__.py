"""Connections to MCP servers, third-party or ours, as processes, containers, addresses or objects."""
