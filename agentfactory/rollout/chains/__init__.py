"""Chains from first prompt to reward: turns, sampling, tool calls, context, outcome."""
