"""Search: indexes on disk, retrieval servers and online engines, and the tool `search` on top of any of them."""
