"""Runs on several machines: `agentfactory launch` writes the job of a scheduler, whose machines run `agentfactory
machine`."""
