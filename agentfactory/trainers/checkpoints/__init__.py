"""Checkpoints of a run: written whole, kept, found, resumed."""
