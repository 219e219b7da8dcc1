"""Training on one machine: its processes, and the folder that a run leaves."""
