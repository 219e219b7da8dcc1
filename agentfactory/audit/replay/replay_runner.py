"""`ReplayRunner`: plays saved chains again, with their own turns, in the recipe's tools and environments."""

from copy import copy
from dataclasses import dataclass

from agentfactory.audit.replay.saved_turns import DivergedError, SavedTurns
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.chain_runner import Runner, begin
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.tool_loop import ToolLoop
from agentfactory.rollout.data import Task
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import Toolset


@dataclass(frozen=True)
class Replayed:
    """A chain that was played again. `diverged`: what happened otherwise than in the saved one; None if nothing did."""

    chain: Trajectory
    diverged: str | None


class ReplayRunner(Runner):
    """A runner whose chains take the turns of saved ones."""

    def __init__(self, recipe: Recipe, renderer: Renderer, toolset: Toolset, rewards: Rewards) -> None:
        super().__init__(recipe, renderer.dialogue, renderer.images, renderer.cut, toolset, rewards)
        self.renderer = renderer
        self._saved: Trajectory | None = None

    async def replay(self, saved: Trajectory, task: Task) -> Replayed:
        """Play a saved chain of `task` again, with its reward at the end. Its tools do the same only if they depend on
        their calls and on the task alone."""
        runner = copy(self)
        runner._saved = saved
        chain, diverged = begin(saved.id), None
        try:
            await runner.play(chain, task, Sampling("", 0.0, seed=saved.id), frozenset({saved.outcome}))
        except DivergedError as error:
            diverged = str(error)
        if diverged is None and chain.messages != saved.messages:
            diverged = "its last messages differ"
        if diverged is None and chain.anchors != saved.anchors:
            diverged = f"the states of its environment differ: {_first_difference(chain, saved)}"
        if diverged is None and chain.outcome is not saved.outcome:
            diverged = f"it ended as {chain.outcome}, and before as {saved.outcome}: {chain.error or ''}"
        return Replayed(chain, diverged)

    def player(self, episode: Episode) -> ToolLoop:
        """See Runner."""
        assert self._saved is not None
        return ToolLoop(episode, SavedTurns(episode, self.renderer, self._saved))


def _first_difference(chain: Trajectory, saved: Trajectory) -> str:
    for turn, (mine, theirs) in enumerate(zip(chain.anchors, saved.anchors, strict=False), 1):
        if mine != theirs:
            return f"{mine} before turn {turn}, and was {theirs}"
    return f"{len(chain.anchors)} anchors, and {len(saved.anchors)} before"
