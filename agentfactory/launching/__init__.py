"""Training on one machine: its processes and the run folder."""
