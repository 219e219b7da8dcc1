"""Tool-call formats, one module per model family."""
