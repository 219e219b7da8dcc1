"""The variations of ScienceWorld's splits, for `data.source`."""

from agentfactory.worlds.scienceworld.scienceworld import scienceworld_tasks as tasks

__all__ = ["tasks"]
