"""A chain from its first prompt to its reward: turns, sampling, calls, context, outcome."""
