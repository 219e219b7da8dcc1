"""Web search engines: each module maps one engine's published format to passages."""
