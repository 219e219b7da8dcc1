"""The tool `browse` and its parts: guarded fetching, HTML to markdown, windows over long texts."""
