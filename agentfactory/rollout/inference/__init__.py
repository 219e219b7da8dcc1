"""Inference servers: their client and connections, and the servers themselves."""
