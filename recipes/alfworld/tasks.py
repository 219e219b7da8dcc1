"""The tasks of ALFWorld's splits, for `data.source`."""

from agentfactory.tools.alfworld.environment import alfworld_tasks as tasks

__all__ = ["tasks"]
