"""Acting: trajectories, rendering, chains, scheduling, rewards, the inference client and server, evaluation."""
