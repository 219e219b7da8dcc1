"""Inference servers and their client."""
