"""Tool-call formats, a module for each family of models."""
