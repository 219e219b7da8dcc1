"""One update: losses, gradients, optimizer steps, and the learner's state."""
