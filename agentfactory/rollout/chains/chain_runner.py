"""Runners, which run chains from start to reward, limit their concurrency and record their outcomes."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward, EnvironmentRewardError, ToolInfrastructureError
from agentfactory.base.run_notices import inform, notify
from agentfactory.rollout.chains.agent_hooks import AgentFailed, AgentHooks
from agentfactory.rollout.chains.chain_counts import COUNTS
from agentfactory.rollout.chains.concurrency import Places
from agentfactory.rollout.chains.episode import Episode, Setup
from agentfactory.rollout.chains.opening_prompt import characters_of, check_lengths, check_texts, opening_messages
from agentfactory.rollout.chains.outcome_warnings import FIXES, ChainOutcomes
from agentfactory.rollout.chains.policy_turns import PolicyTurns
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.chains.simulated_user import BeginUser, UserError, Users
from agentfactory.rollout.chains.tool_loop import ToolLoop
from agentfactory.rollout.config import OutcomePolicy, RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.data.notices import (
    tell_answered_rows,
    tell_null_arguments,
    tell_null_fields,
    tell_unread_fields,
)
from agentfactory.rollout.data.nulls import Nulls, drop_from_history
from agentfactory.rollout.images.image_intake import Images
from agentfactory.rollout.images.parts import images_of_row
from agentfactory.rollout.images.task_images import TaskImages
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards, prediction_of
from agentfactory.rollout.text.dialogue import Dialogue
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Activity, Group, Outcome, StopReason, Trajectory
from agentfactory.tools.calls.limits import Deadline, Rates, check_limits
from agentfactory.tools.calls.truncation import Cut
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)

LEAST_FAILURES, LEAST_TASKS = 4, 3
"""Least numbers of failing chains and tasks before the run stops: a single row of the data may be at fault."""

QUIET_SECONDS = 10.0

_OUTCOMES = {
    StopReason.ANSWER: Outcome.COMPLETED,
    StopReason.FINISH: Outcome.COMPLETED,
    StopReason.USER_DONE: Outcome.COMPLETED,
    StopReason.MAX_TURNS: Outcome.MAX_TURNS,
    StopReason.MAX_TOKENS: Outcome.MAX_TOKENS,
    StopReason.CONTEXT_OVERFLOW: Outcome.CONTEXT_OVERFLOW,
}
"""Stop reason -> outcome of a chain that did not fail; all other reasons mean TOOL_LIMIT."""


def begin(chain_id: str) -> Trajectory:
    """Return an empty trajectory, whose outcome is CANCELLED until the chain has run to its end."""
    return Trajectory(id=chain_id, messages=[], rows=[], outcome=Outcome.CANCELLED)


class RolloutStoppedError(Exception):
    """An error that stops all rollouts; the message gives the reason."""


@dataclass
class FirstVerdicts:
    """A detector of rewards, or agents, that always fail: no chain got a reward, and at least `group_size` chains of
    several of the `tasks` tasks (of `source`) ended as `failure`."""

    group_size: int
    tasks: int
    failure: Outcome = Outcome.REWARD_ERROR
    fix: str = "correct the reward, and try it with `agentfactory tools check RECIPE`"
    source: str = ""
    _works: set[bool] = field(default_factory=set)
    """The stages in which a chain got a reward: False stands for its own rewards, True for those of its group."""
    _failed: int = 0
    _failed_tasks: list[Task] = field(default_factory=list)

    def note(self, chain: Trajectory, task: Task, by_group: bool = False) -> None:
        """Record a chain on `task` that ended, or whose group rewards were added. Raise RolloutStoppedError."""
        if chain.reward is not None:
            self._works.add(by_group)
        if chain.outcome is not self.failure or by_group in self._works:
            return
        self._failed += 1
        # compare by identity: rows of the data may be equal
        if not any(task is failed for failed in self._failed_tasks):
            self._failed_tasks.append(task)
        enough = len(self._failed_tasks) >= min(LEAST_TASKS, self.tasks)
        if enough and self._failed >= max(LEAST_FAILURES, self.group_size):
            of = f" of source {self.source}" if self.source else ""
            raise RolloutStoppedError(
                f"no chain{of} got a reward so far, and {self._failed} ended as {self.failure}: {chain.error}; fix: "
                f"{self.fix}"
            )


class ChainWatch:
    """A watch over the chains of a run on `tasks` tasks, those of `source` if the recipe has several. It warns about
    frequent bad outcomes, and raises RolloutStoppedError if the first rewards, or the agent's chains, all fail."""

    def __init__(self, config: RolloutConfig, tasks: int, source: str = "") -> None:
        self._outcomes = ChainOutcomes(config, source)
        self.verdicts = FirstVerdicts(config.group_size, tasks, source=source)
        failures = (Outcome.AGENT_ERROR, Outcome.USER_ERROR)
        self._others = [FirstVerdicts(config.group_size, tasks, kind, FIXES[kind], source) for kind in failures]

    def note(self, chain: Trajectory, task: Task) -> None:
        self._outcomes.note(chain)
        self.verdicts.note(chain, task)
        for verdicts in self._others:
            verdicts.note(chain, task)


Grade = Callable[[Trajectory], Awaitable[int]]
"""Adds a teacher's grades to the rows of a chain, and returns the number of tokens that the teacher computed."""


class Player(Protocol):
    """The driver of an episode's chain: a tool loop, or an agent with its own loop."""

    episode: Episode

    async def play(self, session: ToolSession) -> StopReason:
        """Run the chain to its end, and return the reason. Raise AgentFailed, InferenceError or tools' errors."""


class Runner(ABC):
    """Base class of runners of one recipe's chains, at most `rollout.concurrency` at a time; copies share this limit
    and call rates. Raise ValueError if limits or context do not suit the tools, or for too few open files."""

    own_loop = False
    """True if an agent with its own loop requests the turns."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        dialogue: Dialogue,
        images: Images,
        cut: Cut | None,
        toolset: Toolset,
        rewards: Rewards,
        client: InferenceClient | None = None,
        users: Users | None = None,
    ):
        self.users, self.user_tools = users, toolset.give_to_user(recipe.rollout.user_tools)
        check_limits(recipe.limits, [spec.name for spec in toolset.specs])
        self.task_images = TaskImages(recipe, images)
        specs = self.task_images.describe(toolset.specs)
        self.setup = Setup(recipe, dialogue, images, specs, cut, Rates(recipe.limits.calls_per_second))
        self.toolset = toolset
        self.rewards = rewards
        self._watch: ChainWatch | None = None
        self._grade: Grade | None = None
        self.places = Places(recipe, client)

    @abstractmethod
    def player(self, episode: Episode) -> Player:
        """Return the player of an episode."""

    def begin_user(self, episode: Episode) -> BeginUser | None:
        """Return the function that begins the chain's simulated user; None without one."""
        return None if self.users is None else partial(self.users.begin, episode, self)

    def begun(self, episode: Episode) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits until the chain may start, which starts its time limit, and holds the
        chain's resources other than tools until it has been scored."""
        return nullcontext()

    def watched(self, tasks: int, source: str = "") -> Self:
        """Return a copy of this runner whose chains, on `tasks` tasks of `source`, are watched by a ChainWatch."""
        runner = copy(self)
        runner._watch = ChainWatch(self.setup.config, tasks, source)
        return runner

    def graded_by(self, grade: Grade) -> Self:
        """Return a copy of this runner whose chains are graded when they have ended and may be trained."""
        runner = copy(self)
        runner._grade = grade
        return runner

    def with_max_turns(self, max_turns: int) -> Self:
        """Return a copy of this runner for chains of at most `max_turns` turns."""
        runner, recipe = copy(self), self.setup.recipe
        rollout = recipe.rollout.model_copy(update={"max_turns": max_turns})
        runner.setup = replace(self.setup, recipe=recipe.model_copy(update={"rollout": rollout}))
        return runner

    async def run(
        self,
        chain_id: str,
        task: Task,
        sampling: Sampling,
        scored: frozenset[Outcome] = ENDINGS,
        begun: list[Trajectory] | None = None,
    ) -> Trajectory:
        """Run a chain to its end; `begun` gets its trajectory at once. See `play`."""
        trajectory = begin(chain_id)
        if begun is not None:
            begun.append(trajectory)
        await self.play(trajectory, task, sampling, scored)
        return trajectory

    async def take(self, task: Task, section: str = "data", row: int | None = None) -> Task:
        """Return a row of `section` as chains get it: see TaskImages, and `drop_from_history`."""
        return await self.task_images.take(drop_from_history(task, self.setup.specs, Nulls()), section, row)

    def for_tools(self, task: Task) -> Task:
        """Convert a row that `take` returned to the form that tools get; see TaskImages."""
        return self.task_images.for_tools(task, self.toolset.takes)

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """Raise SettingError or ToolInfrastructureError for what would fail chains of these rows of `section`: a
        missing field, or an environment that cannot be created or reset with the first one."""
        self.rewards.check_rows(tasks, section)
        if self.users is not None:
            self.users.check_rows(tasks, section)
        reports = (agent := self.setup.config.agent) is not None and agent.reports
        self.toolset.check_rows(tasks, section, has_rewards=reports or not self.rewards.is_empty)
        await self.task_images.check(tasks, section, self.rewards.takes)
        tell_null_fields(tasks, section, {**self.toolset.needed, **self.rewards.needed})
        tell_null_arguments(tasks, section, self.setup.specs)
        readers = (self.rewards.takes, self.toolset.takes, *([] if self.users is None else [self.users.takes]))
        tell_unread_fields(tasks, section, lambda name: any(takes(name) for takes in readers))
        if not self.toolset.environments:
            tell_answered_rows(tasks, section)
        first = self.for_tools(await self.take(tasks[0], section, 1))

        def tell() -> None:
            text = f"{self.toolset.activity('check')}, for the first row of {section}, has not returned after "
            inform(logger, f"{text}{QUIET_SECONDS:g} s; it is given more time")

        slow = asyncio.get_running_loop().call_later(QUIET_SECONDS, tell)
        try:
            async with self.toolset.chain("check", first):
                slow.cancel()
        finally:
            slow.cancel()

    async def run_group(
        self, group_id: str, task: Task, chains: Sequence[Awaitable[Trajectory]], source: str = ""
    ) -> Group:
        """Run `chains` on one task concurrently, and add the group rewards. For `source` see Group."""
        trajectories = list(await asyncio.gather(*chains))
        await self.score_group(trajectories, task)
        return Group(group_id, task, trajectories, source=source)

    async def score_group(self, chains: Sequence[Trajectory], task: Task) -> None:
        """Add the group rewards, which compare `chains`; all must have ended. Raise RolloutStoppedError; see `play`."""
        judged = [chain for chain in chains if chain.reward is not None]
        await self.rewards.score_group(chains, task)
        if self._watch is not None and self.rewards.has_group_rewards:
            for chain in judged:
                self._watch.verdicts.note(chain, task, by_group=True)

    async def play(
        self, trajectory: Trajectory, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> None:
        """Run a chain, whose trajectory `begin` created, to its end, and score it if its outcome is in `scored` and its
        environment returns a reward. `trajectory` is updated meanwhile, so its content survives a cancelled call.
        Failures become outcomes; exceptions are only ServerUnreachableError, programming errors, RolloutStoppedError
        from a `watched` runner, and SettingError from a `graded_by` one if the teacher can grade no such chain."""
        group = trajectory.id.removesuffix(".retry").rpartition(".")[0]
        async with COUNTS.chain(self.places.place(sampling.seed, group)) as place:
            # older groups first: the last chains of a batch do not wait behind those of the next one
            sampling = replace(sampling, priority=place.seat.order[0])
            episode = Episode(self.setup, trajectory, task, sampling)
            episode.place, place.note = place, episode.note_held
            player = self.player(episode)
            async with self.begun(episode):
                try:
                    await self._play_and_score(player, scored)
                except ToolInfrastructureError as error:
                    self._fail(trajectory, error)
            trajectory.seconds = episode.timeline.seconds
            trajectory.metrics = {**episode.metrics(), **trajectory.metrics}
        if self._grade is not None:
            # other chains may take the place meanwhile
            await self._add_grades(episode, self._grade)
        if self._watch is not None:
            self._watch.note(trajectory, task)

    async def _add_grades(self, episode: Episode, grade: Grade) -> None:
        trajectory, tokens, began = episode.trajectory, 0, time.monotonic()
        if self.setup.config.outcome_policy(trajectory.outcome) is OutcomePolicy.KEEP:
            try:
                with episode.timeline.measure(Activity.TEACHER):
                    tokens = await grade(trajectory)
            except InferenceError as error:
                self._fail(trajectory, InferenceError(f"teacher: {error}"))
                trajectory.reward = trajectory.turn_rewards = None
            trajectory.seconds = episode.timeline.seconds
        trajectory.metrics |= {"teacher_tokens": float(tokens), "teacher_seconds": time.monotonic() - began}

    async def _play_and_score(self, player: Player, scored: frozenset[Outcome]) -> None:
        episode, trajectory = player.episode, player.episode.trajectory
        limit = self._deadline()
        async with self.toolset.chain(trajectory.id, self.for_tools(episode.task), limit) as session:
            episode.timeline.note_setup(session.waits)
            # a chain that times out may still be scored: the limit ends its turns, not the session
            try:
                async with asyncio.timeout_at(limit.until) as timer:
                    if episode.place is not None:
                        episode.place.timer = timer
                    trajectory.stop_reason = await player.play(session)
                    trajectory.outcome = _OUTCOMES.get(trajectory.stop_reason, Outcome.TOOL_LIMIT)
            except TimeoutError:
                trajectory.outcome = Outcome.TIMEOUT
                cut = _activity_at(episode, timer.when() or limit.until)
                trajectory.error = f"the chain took longer than {limit.setting}{cut}"
            except (InferenceError, ToolInfrastructureError, AgentFailed, UserError) as error:
                self._fail(trajectory, error)
            if session.anchored and not trajectory.anchors:
                trajectory.anchors = [None] * trajectory.turns
            if trajectory.outcome not in scored:
                return
            with episode.timeline.measure(Activity.REWARD):
                limit = self._deadline()
                environment = episode.reported or await _reward_of(session, trajectory, limit)
                if environment is None and not self.setup.recipe.needs_rewards:
                    environment = EnvironmentReward(0.0)
                seen = self.setup.images.files_of(trajectory.messages)
                # a user's reward may raise any exception, which says nothing about the policy
                try:
                    verdict = await self.rewards.score(
                        trajectory, episode.task, environment, seen, self.task_images.view, episode.workspace, limit
                    )
                except Exception as error:
                    logger.exception("the reward raised an exception for chain %s", trajectory.id)
                    trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                    return
            trajectory.reward, trajectory.turn_rewards = verdict.reward - episode.penalty, verdict.turn_rewards
            trajectory.metrics = dict(verdict.metrics)

    def _deadline(self) -> Deadline:
        return Deadline.after(self.setup.config.timeout_seconds, "rollout.timeout_seconds")

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        trajectory.error = str(error)
        match error:
            case InferenceError():
                trajectory.outcome = Outcome.INFERENCE_ERROR
            case AgentFailed():
                trajectory.outcome = Outcome.AGENT_ERROR
            case UserError():
                trajectory.outcome = Outcome.USER_ERROR
            case EnvironmentRewardError():
                trajectory.outcome = Outcome.REWARD_ERROR
            case _:
                trajectory.outcome = Outcome.TOOL_INFRASTRUCTURE


async def _reward_of(session: ToolSession, trajectory: Trajectory, limit: Deadline) -> EnvironmentReward | None:
    """Return the environment's reward, if it gives one. Raise EnvironmentRewardError if that takes too long."""
    try:
        async with asyncio.timeout_at(limit.until) as timer:
            return await session.reward(prediction_of(trajectory))
    except TimeoutError:
        if not timer.expired():
            raise
        raise EnvironmentRewardError(f"the environment's reward took longer than {limit.setting}") from None


def _activity_at(episode: Episode, moment: float) -> str:
    """Describe the tool call or the request that was cut at this time of `time.monotonic()`, if there was one."""
    found = episode.timeline.running_at(moment)
    names = {Activity.TOOL: "a call of {}", Activity.MODEL: "a request to the model", Activity.USER: "the user"}
    if found is not None and (stretch := found[0]).activity in names:
        return f"; {names[stretch.activity].format(stretch.name)} had run for {found[1]:.1f} s then"
    own_loop = episode.setup.config.agent is not None
    return "; no call and no request was running then: the agent had not ended" if own_loop else ""


class ChainRunner(Runner):
    """A runner of the policy's chains, whose turns `agent` samples and parses. Raise ValueError as Runner does."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: AgentHooks | None = None,
        users: Users | None = None,
    ):
        super().__init__(recipe, renderer.dialogue, renderer.images, renderer.cut, toolset, rewards, client, users)
        renderer.encode(recipe.rollout.assistant_prefix)  # raises if the prefix does not suit the template
        self.renderer = renderer
        self.client = client
        self.sampler = Sampler(recipe, client, renderer.stop_token_ids, renderer.images)
        self.agent = agent or AgentHooks()

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        """Also check the prompts; see `check_prompts`."""
        self.check_prompts(tasks, section)
        await super().check(tasks, section)

    def check_prompts(self, tasks: Sequence[Task], section: str) -> None:
        """Raise SettingError if no prompt without images fits into rollout.max_total_tokens; warn if some do not."""
        check_lengths(tasks, self.setup.config, section)
        # an environment, a system prompt, a simulated user or a user's own hooks may give the task
        config, plain = self.setup.config, type(self.agent) is AgentHooks
        if not self.toolset.environments and not config.system_prompt and config.user is None and plain:
            check_texts(tasks, section)
        most, specs = self.setup.config.max_total_tokens, self.setup.specs
        rows = [number for number, task in enumerate(tasks) if not images_of_row(task)]
        rows.sort(key=lambda row: characters_of(tasks[row]))

        def tokens(row: int) -> int:
            opening = opening_messages(tasks[row], self.setup.config.system_prompt)
            return len(self.renderer.open(self.setup.dialogue.instruct(opening, specs), specs))

        # longer texts have more tokens, nearly always
        fitting = bisect_left(rows, most, key=tokens)
        if fitting == len(rows):
            return
        if fitting == 0:
            problem = (
                f"got {most}, but the shortest prompt of {section} (row {rows[0] + 1}) has {tokens(rows[0])} tokens"
            )
            fix = "raise it and server.max_model_len, or shorten the rows, the system prompt or the tools' descriptions"
            raise SettingError("rollout.max_total_tokens", problem, fix)
        text = f"about {len(rows) - fitting} of {len(tasks)} rows of {section} have prompts of more tokens than "
        text += f"rollout.max_total_tokens={most}, and their chains end as context_overflow without a turn"
        notify(logger, f"long prompts of {section}", f"{text}, such as row {rows[-1] + 1}", times=0)

    def player(self, episode: Episode) -> Player:
        turns = PolicyTurns(episode, self.renderer, self.sampler, self.agent)
        return ToolLoop(episode, turns, self.begin_user(episode))
