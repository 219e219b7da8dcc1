"""Runs chains from start to reward: bounds how many run at a time, and records the outcome of each."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentfactory.rollout.chains.context import check_context
from agentfactory.rollout.chains.episode import Episode, Setup
from agentfactory.rollout.chains.outcome_warnings import ChainOutcomes
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.chains.turn import AgentFailed, AgentHooks
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.parts import has_images
from agentfactory.rollout.images.places_in_text import state_places, unknown_way
from agentfactory.rollout.inference.concurrency import Places
from agentfactory.rollout.inference.connection import InferenceError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Activity, Group, Outcome, StopReason, Trajectory
from agentfactory.tools.calls.limits import Rates, check_limits
from agentfactory.tools.calls.run_notices import tell
from agentfactory.tools.errors import SettingError
from agentfactory.tools.images.coordinates import VIEW_FIELD, ModelView, stating
from agentfactory.tools.messages import EnvironmentRewardError, ToolInfrastructureError
from agentfactory.tools.sessions.toolset import Toolset

if TYPE_CHECKING:
    from agentfactory.rollout.images.image_intake import Sight

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)
"""Outcomes of chains that did not break."""

LEAST_FAILURES, LEAST_TASKS = 4, 3
"""Chains, and tasks, that a reward must at least have failed for: one row of the data may be at fault."""

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


class RolloutStoppedError(Exception):
    """Rollouts cannot continue; the message says why."""


@dataclass
class FirstVerdicts:
    """Detects rewards that cannot work: no chain has been judged, and as many as a group has have failed in that, of
    several of the `tasks` (their number)."""

    group_size: int
    tasks: int
    _works: bool = False
    _group_works: bool = False
    _failed: int = 0
    _failed_tasks: list[Task] = field(default_factory=list)

    def note(self, chain: Trajectory, task: Task) -> None:
        """Note that a chain on `task` ended. Raises RolloutStoppedError."""
        self._works |= chain.reward is not None
        if chain.outcome is Outcome.REWARD_ERROR and not self._works:
            self._note_failure(chain, task)

    def note_group(self, chain: Trajectory, task: Task) -> None:
        """Note that the chains of a group on `task` were compared. Raises RolloutStoppedError."""
        self._group_works |= chain.reward is not None
        if chain.outcome is Outcome.REWARD_ERROR and not self._group_works:
            self._note_failure(chain, task)

    def _note_failure(self, chain: Trajectory, task: Task) -> None:
        self._failed += 1
        # rows of the data may be equal
        if not any(task is failed for failed in self._failed_tasks):
            self._failed_tasks.append(task)
        enough = len(self._failed_tasks) >= min(LEAST_TASKS, self.tasks)
        if enough and self._failed >= max(LEAST_FAILURES, self.group_size):
            raise RolloutStoppedError(
                f"none of the first chains could be judged, {self._failed} ended as reward_error: {chain.error}; fix: "
                "correct the reward, and try it with `agentfactory tools check RECIPE`"
            )


def _tell_nulls(tasks: Sequence[Task], section: str, needed: Mapping[str, str]) -> None:
    """Tell of needed fields that are null in some rows and not in others: a column has null where a row lacks it."""
    for name, who in needed.items():
        nulls = [number for number, task in enumerate(tasks, 1) if task.get(name) is None]
        if nulls and len(nulls) < len(tasks):
            text = f"{section}: {name}, which {who} needs, is null in {len(nulls)} of {len(tasks)} rows"
            tell(logger, f"nulls of {section} in {name}", f"{text}, first in row {nulls[0]}", times=0)


def _blind(recipe: RolloutRecipe, renderer: Renderer, section: str) -> SettingError:
    """Return the error for rows with images and a model that cannot be shown any."""
    if renderer.sight is None:
        from agentfactory.rollout.images.families import why_unseen

        problem = f"its rows have images, and {why_unseen(recipe.model.path)}"
        return SettingError(section, problem, "use a model that sees, or leave out the column `images`")
    problem = "it has no images, and rows of the data have some"
    return SettingError("model.chat_template", problem, "set null: the model's own has them")


def _view(recipe: RolloutRecipe, sight: "Sight") -> ModelView | None:
    from agentfactory.rollout.images.families import view_of

    return view_of(recipe.model.path, sight.vision, recipe.rollout.coordinates)


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
        self.view = None if renderer.sight is None else _view(recipe, renderer.sight)
        """How the model states places in images; None if it sees none, or its way is not known."""
        self.setup = Setup(
            recipe,
            renderer,
            Sampler(recipe, client, renderer.stop_token_ids, renderer.sight),
            toolset.specs if self.view is None else [stating(spec, self.view) for spec in toolset.specs],
            agent or AgentHooks(),
            Rates(recipe.limits.calls_per_second),
        )
        self.renderer = renderer
        self.client = client
        self.toolset = toolset
        self.rewards = rewards
        self._verdicts: FirstVerdicts | None = None
        self._outcomes: ChainOutcomes | None = None
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

    async def take(self, task: Task, section: str = "data", row: int | None = None) -> Task:
        """Return a row of `section`, the one numbered `row` if that is given, as its chains get it: its images are
        stored once for all of them, and places in its text are stated as the model does. Raises SettingError for an
        image that cannot be shown, or a place that is none."""
        task = self._stated(task, section, row)
        if not has_images(task):
            return task
        sight = self.renderer.sight
        if sight is None or not sight.shows:
            raise _blind(self.setup.recipe, self.renderer, section)
        return await sight.take_task(task, section, row)

    def _stated(self, task: Task, section: str, row: int | None) -> Task:
        return state_places(task, self.view, self.setup.recipe.model.path, section, row)

    def for_tools(self, task: Task) -> Task:
        """Return a row, as `take` returned it, with what tools need to know of the model: `model_view`, if a reset
        names it. Raises SettingError if places cannot be converted because the model's way to state them is not
        known."""
        if not self.toolset.takes(VIEW_FIELD):
            return task
        if self.view is None:
            raise unknown_way(self.setup.recipe.model.path, "its tools convert")
        return {**task, VIEW_FIELD: self.view.to_json()}

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """Check for errors that would fail chains of these tasks, the rows of `section`: a field that a reward or a
        reset needs and a row lacks; and, with the first task, an environment that cannot be created or reset (wrong
        options, or a sandbox that this machine lacks). From now on, rewards that only fail stop the chains, and a
        person is told of outcomes that too many chains have.

        Raises SettingError or ToolInfrastructureError.
        """
        self.rewards.check_rows(tasks, section)
        self.toolset.check_rows(tasks, section)
        if any(map(has_images, tasks)):
            sight = self.renderer.sight
            if sight is None or not sight.shows:
                raise _blind(self.setup.recipe, self.renderer, section)
            await asyncio.to_thread(sight.check_tasks, tasks, self.setup.recipe.limits.images, section)
        for number, task in enumerate(tasks, 1):
            self._stated(task, section, number)
        if self.view is None and self.rewards.takes(VIEW_FIELD):
            raise unknown_way(self.setup.recipe.model.path, "its rewards convert")
        _tell_nulls(tasks, section, {**self.toolset.needed, **self.rewards.needed})
        async with self.toolset.chain("check", self.for_tools(await self.take(tasks[0], section, 1))):
            pass
        self._verdicts = FirstVerdicts(self.setup.config.group_size, len(tasks))
        self._outcomes = self._outcomes or ChainOutcomes(self.setup.config)

    async def run_group(self, group_id: str, task: Task, chains: Sequence[Awaitable[Trajectory]]) -> Group:
        """Run `chains` on one task concurrently, and add the rewards that compare them."""
        trajectories = list(await asyncio.gather(*chains))
        await self.score_group(trajectories, task)
        return Group(group_id, task, trajectories)

    async def score_group(self, chains: Sequence[Trajectory], task: Task) -> None:
        """Add the rewards that compare `chains`, all of which have ended. Raises RolloutStoppedError: see `play`."""
        judged = [chain for chain in chains if chain.reward is not None]
        await self.rewards.score_group(chains, task)
        if self._verdicts is not None and self.rewards.has_group_rewards:
            for chain in judged:
                self._verdicts.note_group(chain, task)

    async def play(
        self, trajectory: Trajectory, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> None:
        """Run a chain from `begin` to its end. Failures are outcomes; only ServerUnreachableError, programming errors
        and, after `check`, RolloutStoppedError raise: the rewards have failed for all of the first chains.

        A chain whose outcome is in `scored` gets a reward, unless its environment is gone or fails to give one.
        `trajectory` always contains what the chain has gathered so far, so it stays available if the call is cancelled.
        """
        async with self.places:
            chain = self.episode(trajectory, task, sampling)
            async with chain.begun():
                try:
                    async with asyncio.timeout(self.setup.config.timeout_seconds) as limit:
                        await self._play_and_score(chain, scored, limit)
                except (TimeoutError, ToolInfrastructureError) as error:
                    self._fail(trajectory, error)
            trajectory.seconds = chain.timeline.seconds
            trajectory.metrics = {**chain.metrics(), **trajectory.metrics}
            if self._outcomes is not None:
                self._outcomes.note(trajectory)
            if self._verdicts is not None:
                self._verdicts.note(trajectory, task)

    async def _play_and_score(self, chain: Episode, scored: frozenset[Outcome], limit: asyncio.Timeout) -> None:
        trajectory = chain.trajectory
        async with self.toolset.chain(trajectory.id, self.for_tools(chain.task)) as session:
            chain.timeline.note_setup(session.waits)
            trajectory.workspaces += session.kept
            # a chain that runs out of time may still be scored: the limit ends its turns, not the session
            deadline = limit.when()
            limit.reschedule(None)
            try:
                async with asyncio.timeout_at(deadline):
                    trajectory.stop_reason = await chain.play(session)
                    trajectory.outcome = _OUTCOMES.get(trajectory.stop_reason, Outcome.TOOL_LIMIT)
            except (TimeoutError, InferenceError, ToolInfrastructureError, AgentFailed) as error:
                self._fail(trajectory, error)
            limit.reschedule(asyncio.get_running_loop().time() + self.setup.config.timeout_seconds)
            if trajectory.outcome not in scored:
                return
            with chain.timeline.measure(Activity.REWARD):
                environment = chain.reported or await session.reward()
                sight = self.renderer.sight
                seen = [] if sight is None else sight.files_of(trajectory.messages)
                # a user's reward may raise anything, which says nothing about the policy
                try:
                    verdict = await self.rewards.score(
                        trajectory, chain.task, environment, seen, self.view, chain.workspace
                    )
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
            case AgentFailed():
                trajectory.outcome = Outcome.AGENT_ERROR
            case EnvironmentRewardError():
                trajectory.outcome = Outcome.REWARD_ERROR
            case _:
                trajectory.outcome = Outcome.TOOL_INFRASTRUCTURE
