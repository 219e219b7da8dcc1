"""Tasks of reasoning-gym, and the reward."""

from typing import Any

from agentfactory import reward
from agentfactory.base.messages import EnvironmentReward
from agentfactory.worlds.reasoning_gym.gym_tasks import ReasoningGymTasks


def rows(family: str, count: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Return `count` different tasks of a data set with `options`. The recipes' system prompts ask for <answer>."""
    mix = {family: {"options": options}}
    return ReasoningGymTasks(datasets=mix, size=count, seed=seed, instruction=None).rows()


@reward
def solved(environment: EnvironmentReward) -> float:
    """Return 1 if the data set's verifier gives the answer a full score, else 0: no credit for nearly right ones."""
    return environment.metrics["success"]
