"""Trial of a recipe's rewards on dummy answers, before any chain runs."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from agentfactory.base.messages import EnvironmentReward
from agentfactory.rollout.chains.load_agent import load_agent
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.rewards.scoring import Rewards


async def try_rewards(
    recipe: RolloutRecipe, base: Path, tasks: Sequence[Task], environment: EnvironmentReward | None
) -> list[str]:
    """Call every reward of the recipe on a dummy answer to each task, and return the problems; see Rewards.try_on. If
    the agent is a program, `workspace` is a folder as its chains begin with, removed after the call."""
    faults, agent = [], recipe.rollout.agent
    async with Rewards.load(recipe.rewards, base) as rewards:
        folder_of = None
        if rewards.takes("workspace") and agent is not None and agent.command:
            folder_of = load_agent(agent, base).first_folder
        for number, task in enumerate(tasks, 1):
            async with folder_of(task) if folder_of is not None else nullcontext() as workspace:
                faults += await rewards.try_on(number, task, environment, workspace)
    return faults
