"""Trainer processes: accelerate, rendezvous, sharding, host memory."""
