"""The `agentfactory` command and its subcommands."""
