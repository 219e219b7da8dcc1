"""The training loops, and what surrounds an update: groups, advantages, stopping, health."""
