"""The rollout worker process, and its connection to the trainer."""
