"""The tool `search`, and its sources: indexes on disk, retrieval servers and online engines."""
