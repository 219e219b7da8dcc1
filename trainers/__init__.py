"""Learning: batches, policy, advantages, losses, weight sync, checkpoints and the training loops."""
