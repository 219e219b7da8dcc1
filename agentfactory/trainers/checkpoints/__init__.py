"""Checkpoints of a run: writing, pruning, finding, resuming."""
