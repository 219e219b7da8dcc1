"""Micro-batches: packed rows, prefix trees, images."""
