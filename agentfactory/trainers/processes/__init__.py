"""Trainer processes: accelerate, their rendezvous, and the weights and decisions of rank 0."""
