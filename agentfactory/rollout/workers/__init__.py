"""Rollout worker processes and their connection to the trainer."""
