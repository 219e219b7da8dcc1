"""Two of ScienceWorld's tasks: find the animal with the longest or the shortest life."""

from typing import Any

from agentfactory import reward
from agentfactory.base.messages import EnvironmentReward
from agentfactory.worlds.scienceworld.scienceworld import scienceworld_tasks

TASKS = ["lifespan-longest-lived", "lifespan-shortest-lived"]
QUESTION = "Do the task."
"""Instead of the published instruction, which would be most of each conversation."""


def tasks(split: str) -> list[dict[str, Any]]:
    """Return the rows of an official split. A set of three animals occurs in only one split, and once per task."""
    return [{**row, "question": QUESTION} for row in scienceworld_tasks(split, TASKS)]


@reward
def success(environment: EnvironmentReward) -> float:
    """Return 1 if the score is 100, else 0. The score itself would give half of the maximum to an agent that stops once
    it is outside, and any further action would risk it."""
    return environment.metrics["success"]
