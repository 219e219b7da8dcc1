"""Runners, which run chains from start to reward, limit their concurrency and record their outcomes."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from agentfactory.rollout.chains.agent_hooks import AgentFailed, AgentHooks
from agentfactory.rollout.chains.context import check_context
from agentfactory.rollout.chains.episode import Episode, Setup
from agentfactory.rollout.chains.outcome_warnings import ChainOutcomes
from agentfactory.rollout.chains.policy_turns import PolicyTurns
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.chains.tool_loop import ToolLoop
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.images.task_images import TaskImages
from agentfactory.rollout.inference.concurrency import Places
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Activity, Group, Outcome, StopReason, Trajectory
from agentfactory.tools.calls.limits import Rates, check_limits
from agentfactory.tools.calls.run_notices import inform, notify
from agentfactory.tools.calls.truncation import Cut
from agentfactory.tools.errors import SettingError
from agentfactory.tools.messages import EnvironmentRewardError, ToolInfrastructureError
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)
"""Outcomes of chains that did not fail."""

LEAST_FAILURES, LEAST_TASKS = 4, 3
"""Minimum numbers of chains and tasks for which a reward must fail before the run stops: a single row of the data may
be at fault."""

_OUTCOMES = {
    StopReason.ANSWER: Outcome.COMPLETED,
    StopReason.FINISH: Outcome.COMPLETED,
    StopReason.MAX_TURNS: Outcome.MAX_TURNS,
    StopReason.MAX_TOKENS: Outcome.MAX_TOKENS,
    StopReason.CONTEXT_OVERFLOW: Outcome.CONTEXT_OVERFLOW,
}
"""Stop reason -> outcome of a chain that did not fail; all other reasons mean TOOL_LIMIT."""


def begin(chain_id: str) -> Trajectory:
    """Return an empty trajectory, whose outcome is CANCELLED until the chain has run to its end."""
    return Trajectory(id=chain_id, messages=[], rows=[], outcome=Outcome.CANCELLED)


_SLOW_SECONDS = 10.0
"""Seconds after which the user is informed that the first reset has not ended."""
_LEAST_CHECK_SECONDS = 60.0
"""Least time limit of the first reset."""


class RolloutStoppedError(Exception):
    """An error that stops all rollouts; the message gives the reason."""


@dataclass
class FirstVerdicts:
    """A detector of rewards that always fail: no chain got a reward, and at least `group_size` chains of several tasks
    ended as reward_error. `tasks` is the number of tasks."""

    group_size: int
    tasks: int
    _works: bool = False
    _group_works: bool = False
    _failed: int = 0
    _failed_tasks: list[Task] = field(default_factory=list)

    def note(self, chain: Trajectory, task: Task) -> None:
        """Record a chain on `task` that ended. Raise RolloutStoppedError if the rewards always fail."""
        self._works |= chain.reward is not None
        if chain.outcome is Outcome.REWARD_ERROR and not self._works:
            self._note_failure(chain, task)

    def note_group(self, chain: Trajectory, task: Task) -> None:
        """Record a chain on `task` after its group rewards. Raise RolloutStoppedError if they always fail."""
        self._group_works |= chain.reward is not None
        if chain.outcome is Outcome.REWARD_ERROR and not self._group_works:
            self._note_failure(chain, task)

    def _note_failure(self, chain: Trajectory, task: Task) -> None:
        self._failed += 1
        # compare by identity: rows of the data may be equal
        if not any(task is failed for failed in self._failed_tasks):
            self._failed_tasks.append(task)
        enough = len(self._failed_tasks) >= min(LEAST_TASKS, self.tasks)
        if enough and self._failed >= max(LEAST_FAILURES, self.group_size):
            raise RolloutStoppedError(
                f"no chain got a reward so far, and {self._failed} ended as reward_error: {chain.error}; fix: "
                "correct the reward, and try it with `agentfactory tools check RECIPE`"
            )


def _tell_nulls(tasks: Sequence[Task], section: str, needed: Mapping[str, str]) -> None:
    """Warn about needed fields that are null in some rows but not all; tables have null where a row lacks a field."""
    for name, who in needed.items():
        nulls = [number for number, task in enumerate(tasks, 1) if task.get(name) is None]
        if nulls and len(nulls) < len(tasks):
            text = f"{section}: the field {name}, which {who} needs, is null in {len(nulls)} of {len(tasks)} rows"
            notify(logger, f"nulls of {section} in {name}", f"{text}, first in row {nulls[0]}", times=0)


class ChainWatch:
    """A watch over the chains of a run on `tasks` tasks. It warns about frequent bad outcomes, and stops the run if its
    first rewards all fail."""

    def __init__(self, config: RolloutConfig, tasks: int) -> None:
        self._outcomes = ChainOutcomes(config)
        self._verdicts = FirstVerdicts(config.group_size, tasks)

    def note(self, chain: Trajectory, task: Task) -> None:
        """Record a chain on `task` that ended. Raise RolloutStoppedError if the rewards always fail."""
        self._outcomes.note(chain)
        self._verdicts.note(chain, task)

    def note_group(self, judged: Sequence[Trajectory], task: Task) -> None:
        """Record the scored chains of a group on `task` after the group rewards. Raise RolloutStoppedError if these
        always fail."""
        for chain in judged:
            self._verdicts.note_group(chain, task)


class Player(Protocol):
    """The driver of an episode's chain: a tool loop, or an agent with its own loop."""

    episode: Episode

    async def play(self, session: ToolSession) -> StopReason:
        """Run the chain until it ends, and return the reason. Raise AgentFailed, InferenceError or
        ToolInfrastructureError if it fails."""

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the chain by name."""


class Runner(ABC):
    """Base class of runners: runs chains of one recipe, at most `rollout.concurrency` at a time. Subclasses choose the
    source of the turns."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        dialogue: Dialogue,
        images: Images,
        cut: Cut | None,
        toolset: Toolset,
        rewards: Rewards,
    ):
        """Create a runner. Raise ValueError if the limits or the context policy do not suit these tools."""
        check_limits(recipe.limits, [spec.name for spec in toolset.specs])
        check_context(recipe.rollout)
        self.task_images = TaskImages(recipe, images)
        specs = self.task_images.describe(toolset.specs)
        self.setup = Setup(recipe, dialogue, images, specs, cut, Rates(recipe.limits.calls_per_second))
        self.toolset = toolset
        self.rewards = rewards
        self._watch: ChainWatch | None = None
        limit = recipe.rollout.concurrency
        self.places = Places(recipe.server.max_num_seqs if limit == "auto" else limit)

    @abstractmethod
    def player(self, episode: Episode) -> Player:
        """Return the player of an episode."""

    def begun(self, episode: Episode) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits until the chain may start, which starts its time limit, and holds the
        chain's resources other than tools until it has been scored."""
        return nullcontext()

    def watched(self, tasks: int) -> Self:
        """Return a copy of this runner whose chains, on `tasks` tasks, are watched by a ChainWatch; it shares the
        concurrency limit and call rates."""
        runner = copy(self)
        runner._watch = ChainWatch(self.setup.config, tasks)
        return runner

    def with_max_turns(self, max_turns: int) -> Self:
        """Return a copy of this runner for chains of at most `max_turns` turns; it shares the concurrency limit and
        call rates."""
        runner, recipe = copy(self), self.setup.recipe
        rollout = recipe.rollout.model_copy(update={"max_turns": max_turns})
        runner.setup = replace(self.setup, recipe=recipe.model_copy(update={"rollout": rollout}))
        return runner

    async def run(
        self, chain_id: str, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> Trajectory:
        """Run one chain to its end; see `play`."""
        trajectory = begin(chain_id)
        await self.play(trajectory, task, sampling, scored)
        return trajectory

    async def take(self, task: Task, section: str = "data", row: int | None = None) -> Task:
        """Return a row of `section` as chains get it; see TaskImages."""
        return await self.task_images.take(task, section, row)

    def for_tools(self, task: Task) -> Task:
        """Convert a row that `take` returned to the form that tools get; see TaskImages."""
        return self.task_images.for_tools(task, self.toolset.takes)

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """Check for errors that would fail chains of these tasks, the rows of `section`: a row without a field that a
        reward or reset needs; and, with the first task, an environment that cannot be created or reset (wrong options,
        or a missing sandbox).

        Raise SettingError or ToolInfrastructureError.
        """
        self.rewards.check_rows(tasks, section)
        self.toolset.check_rows(tasks, section)
        await self.task_images.check(tasks, section, self.rewards.takes)
        _tell_nulls(tasks, section, {**self.toolset.needed, **self.rewards.needed})
        task = self.for_tools(await self.take(tasks[0], section, 1))
        # the first instance may take longer to create than later ones
        seconds = max(self.setup.config.timeout_seconds, _LEAST_CHECK_SECONDS)
        environments = ", ".join(self.toolset.environments)
        first = f"the first reset, of {environments}," if environments else "the start of the tool servers"
        slow = asyncio.get_running_loop().call_later(
            _SLOW_SECONDS, inform, logger, f"still waiting for {first} for up to {seconds:g} s"
        )
        try:
            async with asyncio.timeout(seconds), self.toolset.chain("check", task):
                pass
        except TimeoutError:
            problem = f"with row 1, {first} did not end within {seconds:g} s"
            raise SettingError(section, problem, "correct it, or raise rollout.timeout_seconds") from None
        finally:
            slow.cancel()

    async def run_group(self, group_id: str, task: Task, chains: Sequence[Awaitable[Trajectory]]) -> Group:
        """Run `chains` on one task concurrently, and add the group rewards."""
        trajectories = list(await asyncio.gather(*chains))
        await self.score_group(trajectories, task)
        return Group(group_id, task, trajectories)

    async def score_group(self, chains: Sequence[Trajectory], task: Task) -> None:
        """Add the group rewards, which compare `chains`; all must have ended. Raise RolloutStoppedError; see `play`."""
        judged = [chain for chain in chains if chain.reward is not None]
        await self.rewards.score_group(chains, task)
        if self._watch is not None and self.rewards.has_group_rewards:
            self._watch.note_group(judged, task)

    async def play(
        self, trajectory: Trajectory, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> None:
        """Run a chain, whose trajectory `begin` created, to its end. Failures become outcomes; exceptions are only
        ServerUnreachableError, programming errors and, from a `watched` runner, RolloutStoppedError if the rewards of
        all first chains failed.

        A chain whose outcome is in `scored` gets a reward, unless its environment is gone or fails to return one.
        `trajectory` is updated as the chain runs, so its content so far survives a cancelled call.
        """
        async with self.places:
            episode = Episode(self.setup, trajectory, task, sampling)
            player = self.player(episode)
            async with self.begun(episode):
                try:
                    async with asyncio.timeout(self.setup.config.timeout_seconds) as limit:
                        await self._play_and_score(player, scored, limit)
                except (TimeoutError, ToolInfrastructureError) as error:
                    self._fail(episode, error)
            trajectory.seconds = episode.timeline.seconds
            trajectory.metrics = {**player.metrics(), **trajectory.metrics}
            if self._watch is not None:
                self._watch.note(trajectory, task)

    async def _play_and_score(self, player: Player, scored: frozenset[Outcome], limit: asyncio.Timeout) -> None:
        episode, trajectory = player.episode, player.episode.trajectory
        async with self.toolset.chain(trajectory.id, self.for_tools(episode.task)) as session:
            episode.timeline.note_setup(session.waits)
            trajectory.workspaces += session.kept
            # a chain that times out may still be scored: the limit ends its turns, not the session
            deadline = limit.when()
            limit.reschedule(None)
            try:
                async with asyncio.timeout_at(deadline):
                    trajectory.stop_reason = await player.play(session)
                    trajectory.outcome = _OUTCOMES.get(trajectory.stop_reason, Outcome.TOOL_LIMIT)
            except (TimeoutError, InferenceError, ToolInfrastructureError, AgentFailed) as error:
                self._fail(episode, error)
            limit.reschedule(asyncio.get_running_loop().time() + self.setup.config.timeout_seconds)
            if trajectory.outcome not in scored:
                return
            with episode.timeline.measure(Activity.REWARD):
                environment = episode.reported or await session.reward()
                seen = self.setup.images.files_of(trajectory.messages)
                # a user's reward may raise any exception, which says nothing about the policy
                try:
                    verdict = await self.rewards.score(
                        trajectory, episode.task, environment, seen, self.task_images.view, episode.workspace
                    )
                except Exception as error:
                    logger.exception("the reward raised an exception for chain %s", trajectory.id)
                    trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                    return
            trajectory.reward, trajectory.turn_rewards = verdict.reward - episode.penalty, verdict.turn_rewards
            trajectory.metrics = dict(verdict.metrics)

    def _fail(self, episode: Episode, error: Exception) -> None:
        trajectory = episode.trajectory
        trajectory.error = str(error)
        match error:
            case TimeoutError():
                trajectory.outcome = Outcome.TIMEOUT
                trajectory.error = (
                    f"the chain took longer than rollout.timeout_seconds={self.setup.config.timeout_seconds}"
                )
                if cut := episode.timeline.unfinished():
                    trajectory.error += f"; {cut} had not ended"
            case InferenceError():
                trajectory.outcome = Outcome.INFERENCE_ERROR
            case AgentFailed():
                trajectory.outcome = Outcome.AGENT_ERROR
            case EnvironmentRewardError():
                trajectory.outcome = Outcome.REWARD_ERROR
            case _:
                trajectory.outcome = Outcome.TOOL_INFRASTRUCTURE


class ChainRunner(Runner):
    """A runner of the policy's chains, whose turns `agent` samples and parses."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: AgentHooks | None = None,
    ):
        """Create a runner. Raise ValueError as Runner does, or if the assistant prefix does not suit the template."""
        super().__init__(recipe, renderer.dialogue, renderer.images, renderer.cut, toolset, rewards)
        renderer.encode(recipe.rollout.assistant_prefix)  # raises if the prefix does not suit the template
        self.renderer = renderer
        self.client = client
        self.sampler = Sampler(recipe, client, renderer.stop_token_ids, renderer.images)
        self.agent = agent or AgentHooks()

    def player(self, episode: Episode) -> Player:
        """See Runner."""
        return ToolLoop(episode, PolicyTurns(episode, self.renderer, self.sampler, self.agent))
