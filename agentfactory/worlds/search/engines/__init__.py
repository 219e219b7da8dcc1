"""Search engines of the web: each module maps one engine's published format to passages."""
