"""The variations of ScienceWorld's splits, for `data.source`."""

from agentfactory.tools.scienceworld.environment import scienceworld_tasks as tasks

__all__ = ["tasks"]
