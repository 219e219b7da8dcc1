"""The training loops, and the parts around an update: groups, advantages, stopping, health."""
