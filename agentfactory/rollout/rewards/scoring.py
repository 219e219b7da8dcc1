"""Scoring of chains by the recipe's rewards: checks against the data, calls, and the weighted sum."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward, own_copy, text_of
from agentfactory.base.processes.threads import call_within
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.config import RewardConfig
from agentfactory.rollout.data import Task
from agentfactory.rollout.rewards.reward_spec import RewardError, RewardSpec, check_turns, load_reward, run
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from agentfactory.tools.calls.limits import Deadline
from agentfactory.tools.images.coordinates import ModelView

logger = logging.getLogger(__name__)

_PAGE = "docs/rewards.md"
MOST_NAMES = 1000
"""Maximum number of distinct metric names over all chains; each is a column of metrics.jsonl for the whole run."""
OWN_CHECK_SECONDS = 5.0
"""Total time for the rewards' own checks of the rows."""


def prediction_of(trajectory: Trajectory) -> str:
    """Return the result of an agent with its own loop; without one, the text of the last assistant message, if any."""
    if trajectory.result is not None:
        return trajectory.result
    last = next((message for message in reversed(trajectory.messages) if message["role"] == "assistant"), {})
    return text_of(last.get("content") or "")


class Rewards(AbstractAsyncContextManager["Rewards"]):
    """The weighted sum of several rewards; without any, the environment's own reward. As an async context manager, it
    closes the rewards' resources on exit. If there are several, the unweighted value of each is a metric of the chain:
    `reward/<name>`. Two rewards must not have metrics of one name, but may replace the environment's."""

    def __init__(self, rewards: Sequence[Callable[..., Any] | RewardConfig | str] = (), base: Path = Path()):
        """Create from Python callables, each with weight 1, and from recipe entries: prebuilt names, and `FILE.py:NAME`
        below `base` marked with `@reward`. Raise SettingError for unusable ones. The second of a name is NAME_2."""
        self._entries = [load_reward(reward, f"rewards.{index}", base) for index, reward in enumerate(rewards)]
        self._giver_of_metric: dict[str, str] = {}
        self._reports_success: dict[str, set[bool]] = {}
        """Name of a reward -> whether it has returned `success`, and whether it has not."""
        self._names: set[str] = set()
        taken: set[str] = set()
        for index, entry in enumerate(self._entries):
            numbered = (f"{entry.name}_{number}" for number in itertools.count(2))
            name = next(name for name in itertools.chain([entry.name], numbered) if name not in taken)
            taken.add(name)
            self._entries[index] = replace(entry, name=name)

    @property
    def is_empty(self) -> bool:
        """True if chains have only the reward of an environment, or one that their program reports."""
        return not self._entries

    @property
    def has_group_rewards(self) -> bool:
        return any(entry.group for entry in self._entries)

    def takes(self, name: str) -> bool:
        return any(name in entry.parameters for entry in self._entries)

    @property
    def needed(self) -> dict[str, str]:
        """The row fields that parameters of rewards need -> the name of the reward."""
        return {name: entry.name for entry in self._entries for name in _needed(entry)}

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        """Check the rows of `section`, for OWN_CHECK_SECONDS also by the rewards' own checks. Errors name the row."""
        until = time.monotonic() + OWN_CHECK_SECONDS
        with announced(f"checking the rows of {section} by the rewards"):
            for number, task in enumerate(tasks, 1):
                try:
                    self.check(task, own=time.monotonic() < until)
                except SettingError as error:
                    problem = f"{error.problem}, in row {number} of {section}"
                    fix = error.fix.replace("data.columns", f"{section}.columns")
                    raise SettingError(error.field, problem, fix) from error.__cause__

    def check(self, task: Task, own: bool = True) -> None:
        """Raise SettingError if a reward cannot be called for `task`, or (`own`) if its own check refuses the task."""
        for entry in self._entries:
            for name in entry.parameters:
                if name in entry.offered and name in task:
                    problem = f"{entry.name} takes {name!r}, which is also a field of the data"
                    fix = f"give the field another name by data.columns, such as {{row_{name}: {name}}}"
                    raise SettingError(entry.label, problem, fix)
            for name in _needed(entry):
                if name not in task:
                    places = f"neither one of {', '.join(entry.offered)} nor a field of the data ({', '.join(task)})"
                    fix = "set it in the entry's options, or rename a field by data.columns"
                    raise SettingError(entry.label, f"{entry.name} needs {name!r}, which is {places}", fix)
            if own and (own_check := getattr(entry.function, "check", None)):
                try:
                    call_within(partial(own_check, own_copy(task)), entry.timeout_seconds)
                except TimeoutError:
                    problem = f"{entry.name}.check took longer than {entry.limit}"
                    raise SettingError(entry.label, problem, "correct it, or raise the limit") from None
                except ValueError as error:
                    fix = "correct the row, change the entry's options, or rename a field by data.columns"
                    raise SettingError(entry.label, f"{entry.name} {error}", fix) from error
                except Exception as error:  # boundary: user code
                    problem = f"{entry.name}.check raised {type(error).__name__}: {error}"
                    fix = "correct it; for a row that the reward cannot score, it raises ValueError"
                    raise SettingError(entry.label, problem, fix) from error

    async def score(
        self,
        trajectory: Trajectory,
        task: Task,
        environment: EnvironmentReward | None,
        seen_images: Sequence[str] = (),
        view: ModelView | None = None,
        workspace: Path | None = None,
        limit: Deadline | None = None,
    ) -> EnvironmentReward:
        """Return the weighted sum of the chain's rewards and turn rewards, without group rewards, and their metrics.
        `seen_images`, `view` and `workspace` are offered to rewards; `limit` bounds all together. Raise RewardError if
        a reward raises or takes too long, TypeError or ValueError if its result is invalid."""
        if not self._entries:
            if environment is None:
                raise ValueError("no reward: the recipe has no rewards and no environment returned one")
            check_turns(environment, trajectory, "the environment")
            return replace(environment, metrics=self._known(environment.metrics))
        given = {"environment": environment, "seen_images": list(seen_images), "model_view": view}
        offered = _offered(trajectory, **given, workspace=workspace)
        total = EnvironmentReward(0.0, self._known(environment.metrics) if environment else {})
        for entry in self._entries:
            if not entry.group:
                total.add(self._weighted(entry, entry.parse(await entry.ask(offered, task, limit), trajectory)))
        return total

    async def try_on(
        self, number: int, task: Task, environment: EnvironmentReward | None, workspace: Path | None = None
    ) -> list[str]:
        """Call every reward on a dummy answer to a task, and return the problems, with the task's number."""
        faults = []
        opening = task["messages"] if "messages" in task else [{"role": "user", "content": task.get("question", "")}]
        row = Row([0, 1], [0, 1], [0.0, -1.0], [Span("0", 1, 2)], turn_ends=[2])
        messages = [*opening, {"role": "assistant", "content": "This is a made answer."}]
        made = Trajectory("made", messages, [row], Outcome.COMPLETED, turns=1, stop_reason=StopReason.ANSWER)
        given: dict[str, Any] = {"environment": environment, "seen_images": [], "workspace": workspace}
        given["model_view"] = ModelView()
        for entry in self._entries:
            try:
                offered = _offered_together([made] * 2) if entry.group else _offered(made, **given)
                verdict = await entry.ask(offered, task)
                for one in entry.parse_group(verdict, 2) if entry.group else [verdict]:
                    entry.parse(one, made)
            except (RewardError, TypeError, ValueError) as error:
                fault = f"{entry.label}, on a dummy answer to task {number}: {error}"
                if workspace is None and "workspace" in entry.parameters:
                    fault += "; chains have no workspace, because no program is the agent (rollout.agent.command)"
                faults.append(fault)
        return faults

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Add the group rewards to the rewards and metrics of a task's chains that have a reward. If a group reward
        fails in any way, all these chains end as reward_error, without a reward."""
        members = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if not members or not self.has_group_rewards:
            return
        try:
            totals = [EnvironmentReward(member.reward or 0.0, {}, member.turn_rewards) for member in members]
            for entry in (entry for entry in self._entries if entry.group):
                verdicts = entry.parse_group(await entry.ask(_offered_together(members), task), len(members))
                for member, total, verdict in zip(members, totals, verdicts, strict=True):
                    total.add(self._weighted(entry, entry.parse(verdict, member)))
        except Exception as error:  # boundary: user code
            logger.exception("a group reward failed for chains %s", ", ".join(member.id for member in members))
            for member in members:
                member.outcome, member.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                member.reward = member.turn_rewards = None
            return
        for member, total in zip(members, totals, strict=True):
            member.reward, member.turn_rewards = total.reward, total.turn_rewards
            member.metrics |= total.metrics

    def _known(self, metrics: Mapping[str, float]) -> dict[str, float]:
        known = {}
        for name, value in metrics.items():
            if len(self._names) < MOST_NAMES:
                self._names.add(name)
            if name in self._names:
                known[name] = value
        if left_out := metrics.keys() - known:
            text = f"chains report metrics under more than {MOST_NAMES} names; new ones are dropped ({min(left_out)})"
            notify(logger, "names of metrics", f"{text}; fix: use names that do not change with the chain", see=_PAGE)
        return known

    def _weighted(self, entry: RewardSpec, verdict: EnvironmentReward) -> EnvironmentReward:
        metrics = self._known(verdict.metrics)
        for metric in metrics:
            giver = self._giver_of_metric.setdefault(metric, entry.name)
            if giver != entry.name:
                raise ValueError(f"{giver} and {entry.name} both have the metric {metric!r}; rename it in one of them")
        reported = self._reports_success.setdefault(entry.name, set())
        reported.add("success" in metrics)
        if len(reported) == 2:
            text = f"{entry.name} returns success for some chains only, and the means of success cover only these"
            notify(logger, f"success of {entry.name}", f"{text}; fix: return it for every chain", see=_PAGE)
        alone = {} if len(self._entries) == 1 else {f"reward/{entry.name}": verdict.reward}
        turns = verdict.turn_rewards and [entry.weight * turn for turn in verdict.turn_rewards]
        return EnvironmentReward(entry.weight * verdict.reward, metrics | alone, turns)

    async def __aexit__(self, *exception: object) -> None:
        for entry in self._entries:
            if close := getattr(entry.function, "close", None):
                try:
                    async with asyncio.timeout(entry.timeout_seconds):
                        await run(close)
                except TimeoutError:
                    logger.warning("closing the reward %s took longer than %s", entry.name, entry.limit)
                except Exception:  # boundary: user code
                    logger.exception("closing the reward %s failed", entry.name)


def _offered(trajectory: Trajectory, **given: Any) -> dict[str, Any]:
    prediction = prediction_of(trajectory)
    return {"prediction": prediction, "final_response": prediction, "trajectory": trajectory, **given}


def _offered_together(members: list[Trajectory]) -> dict[str, Any]:
    return {"predictions": [prediction_of(member) for member in members], "trajectories": members}


def _needed(entry: RewardSpec) -> list[str]:
    known = (*entry.offered, *entry.options)
    required = [p.name for p in entry.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return [name for name in required if name not in known]
