"""Two of ScienceWorld's tasks in which the animal with the longest or the shortest life has to be found."""

from typing import Any

from agentfactory import reward
from agentfactory.tools.messages import EnvironmentReward
from agentfactory.worlds.scienceworld.scienceworld import scienceworld_tasks

TASKS = ["lifespan-longest-lived", "lifespan-shortest-lived"]
QUESTION = "Do the task."
"""Instead of the published instruction, which would be most of each conversation."""


def tasks(split: str) -> list[dict[str, Any]]:
    """Return the rows of an official split. No three animals meet in two splits, or twice in one task."""
    return [{**row, "question": QUESTION} for row in scienceworld_tasks(split, TASKS)]


@reward
def success(environment: EnvironmentReward) -> float:
    """Return whether the score is 100. By the score itself, an agent that does nothing once it is outside has half of
    what there is to get, and all others risk it."""
    return environment.metrics["success"]
