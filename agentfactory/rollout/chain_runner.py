"""Runs chains from start to reward: bounds how many run at a time, and records the outcome of each."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from copy import copy
from dataclasses import replace

from agentfactory.rollout.agent import AgentHooks
from agentfactory.rollout.client import InferenceClient
from agentfactory.rollout.concurrency import Places
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.connection import InferenceError
from agentfactory.rollout.context import check_context
from agentfactory.rollout.data import Task
from agentfactory.rollout.episode import Episode, Setup
from agentfactory.rollout.renderer import Renderer
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.sampling import Sampler, Sampling
from agentfactory.rollout.trajectory import Activity, Group, Outcome, StopReason, Trajectory
from agentfactory.tools.limits import Rates, check_limits
from agentfactory.tools.messages import EnvironmentRewardError, ToolInfrastructureError
from agentfactory.tools.toolset import Toolset

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)
"""Outcomes of chains that did not break."""

_OUTCOMES = {
    StopReason.ANSWER: Outcome.COMPLETED,
    StopReason.FINISH: Outcome.COMPLETED,
    StopReason.MAX_TURNS: Outcome.MAX_TURNS,
    StopReason.MAX_TOKENS: Outcome.MAX_TOKENS,
    StopReason.CONTEXT_OVERFLOW: Outcome.CONTEXT_OVERFLOW,
}
"""Stop reason -> outcome of a chain that did not break; any other reason is that of a limit."""


def begin(chain_id: str) -> Trajectory:
    """Return an empty chain, which counts as cancelled until it is played to an end."""
    return Trajectory(id=chain_id, messages=[], rows=[], outcome=Outcome.CANCELLED)


class ChainRunner:
    """Runs chains of one recipe; at most `rollout.concurrency` of them are alive at a time."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: AgentHooks | None = None,
    ):
        """Raises ValueError if the limits, context policy or assistant prefix cannot work with these tools and this
        template."""
        check_limits(recipe.limits, [spec.name for spec in toolset.specs])
        check_context(recipe.rollout)
        renderer.encode(recipe.rollout.assistant_prefix)  # raises at once if the prefix does not fit the template
        self.setup = Setup(
            recipe,
            renderer,
            Sampler(recipe, client, renderer.stop_token_ids),
            toolset.specs,
            agent or AgentHooks(),
            Rates(recipe.limits.calls_per_second),
        )
        self.client = client
        self.toolset = toolset
        self.rewards = rewards
        limit = recipe.rollout.concurrency
        self.places = Places(recipe.server.max_num_seqs if limit == "auto" else limit)

    def with_max_turns(self, max_turns: int) -> "ChainRunner":
        """Return the same runner, sharing its places and rates, for chains of at most `max_turns` turns."""
        runner, recipe = copy(self), self.setup.recipe
        rollout = recipe.rollout.model_copy(update={"max_turns": max_turns})
        runner.setup = replace(self.setup, recipe=recipe.model_copy(update={"rollout": rollout}))
        return runner

    def episode(self, trajectory: Trajectory, task: Task, sampling: Sampling) -> Episode:
        """Create the episode of a chain that is about to begin."""
        return Episode(self.setup, trajectory, task, sampling)

    async def run(
        self, chain_id: str, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> Trajectory:
        """Run one chain to its end; see `play`."""
        trajectory = begin(chain_id)
        await self.play(trajectory, task, sampling, scored)
        return trajectory

    async def check(self, task: Task) -> None:
        """Check with the first task for errors that would fail every chain: a reward that needs a field the data lacks,
        or an environment that cannot be created or reset (wrong options, or a sandbox that this machine lacks).

        Raises SettingError or ToolInfrastructureError.
        """
        self.rewards.check(task)
        async with self.toolset.chain("check", task):
            pass

    async def run_group(self, group_id: str, task: Task, chains: Sequence[Awaitable[Trajectory]]) -> Group:
        """Run `chains` on one task concurrently, and add the rewards that compare them."""
        trajectories = list(await asyncio.gather(*chains))
        await self.rewards.score_group(trajectories, task)
        return Group(group_id, task, trajectories)

    async def play(
        self, trajectory: Trajectory, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> None:
        """Run a chain from `begin` to its end. Failures are outcomes; only ServerUnreachableError and programming
        errors raise.

        A chain whose outcome is in `scored` gets a reward, unless its environment is gone or fails to give one.
        `trajectory` always contains what the chain has gathered so far, so it stays available if the call is cancelled.
        """
        async with self.places:
            chain = self.episode(trajectory, task, sampling)
            try:
                async with asyncio.timeout(self.setup.config.timeout_seconds) as limit:
                    await self._play_and_score(chain, scored, limit)
            except (TimeoutError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            trajectory.seconds = chain.timeline.seconds
            trajectory.metrics = {**chain.metrics(), **trajectory.metrics}

    async def _play_and_score(self, chain: Episode, scored: frozenset[Outcome], limit: asyncio.Timeout) -> None:
        trajectory = chain.trajectory
        async with self.toolset.chain(trajectory.id, chain.task) as session:
            chain.timeline.note_setup(session.waits)
            # a chain that runs out of time may still be scored: the limit ends its turns, not the session
            deadline = limit.when()
            limit.reschedule(None)
            try:
                async with asyncio.timeout_at(deadline):
                    trajectory.stop_reason = await chain.play(session)
                    trajectory.outcome = _OUTCOMES.get(trajectory.stop_reason, Outcome.TOOL_LIMIT)
            except (TimeoutError, InferenceError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            limit.reschedule(asyncio.get_running_loop().time() + self.setup.config.timeout_seconds)
            if trajectory.outcome not in scored:
                return
            with chain.timeline.measure(Activity.REWARD):
                environment = await session.reward()
                # a user's reward may raise anything, which says nothing about the policy
                try:
                    verdict = await self.rewards.score(trajectory, chain.task, environment)
                except Exception as error:
                    logger.exception("the reward of chain %s raised", trajectory.id)
                    trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                    return
            trajectory.reward, trajectory.turn_rewards = verdict.reward - chain.penalty, verdict.turn_rewards
            trajectory.metrics = dict(verdict.metrics)

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        trajectory.error = str(error)
        match error:
            case TimeoutError():
                trajectory.outcome = Outcome.TIMEOUT
                trajectory.error = (
                    f"the chain took longer than rollout.timeout_seconds={self.setup.config.timeout_seconds}"
                )
            case InferenceError():
                trajectory.outcome = Outcome.INFERENCE_ERROR
            case EnvironmentRewardError():
                trajectory.outcome = Outcome.REWARD_ERROR
            case _:
                trajectory.outcome = Outcome.TOOL_INFRASTRUCTURE
