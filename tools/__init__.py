"""What agents act on: messages, calls and results, `@tool`, `Environment`, MCP sessions and our own MCP servers."""
