"""Pages of the web for agents: guarded fetching, HTML to markdown, windows over long texts, the tool `browse`."""
