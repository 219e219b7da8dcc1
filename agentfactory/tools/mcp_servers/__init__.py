"""Connections to third-party and own MCP servers: processes, containers, URLs or objects."""
