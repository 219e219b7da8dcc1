"""The `agentfactory` command, and what each of its commands does."""
