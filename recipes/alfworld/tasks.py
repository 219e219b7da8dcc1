"""The tasks of ALFWorld's splits, for `data.source`."""

from agentfactory.worlds.alfworld.alfworld import alfworld_tasks as tasks

__all__ = ["tasks"]
