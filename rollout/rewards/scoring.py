"""The recipe's rewards: loaded, checked against the data, asked, weighted and added up."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from rollout.config import RewardConfig
from rollout.data import Task
from rollout.rewards.decorator import parameters_of
from rollout.trajectory import Outcome, Trajectory
from tools.messages import EnvironmentReward, text_of
from tools.threads import run_in_thread
from tools.user_code import UserCodeError, load_object

logger = logging.getLogger(__name__)

PREBUILT = {
    "exact_match": "rollout.rewards.answers:ExactMatch",
    "f1": "rollout.rewards.answers:F1",
    "math_equal": "rollout.rewards.math_equal:MathEqual",
    "code_tests": "rollout.rewards.code_tests:CodeTests",
    "format": "rollout.rewards.shape:Format",
    "length": "rollout.rewards.shape:Length",
    "judge": "rollout.rewards.judge:Judge",
}
"""The rewards that come with AgentFactory: name -> `package.module:NAME`; loaded when it is asked for."""

OFFERED = ("prediction", "final_response", "trajectory", "environment")
GROUP_OFFERED = ("predictions", "trajectories")
_SECONDS: float = RewardConfig.model_fields["timeout_seconds"].default


class RewardError(Exception):
    """A reward raised, took too long, or could not judge: no verdict on the policy."""


class InvalidReward(ValueError):
    """A recipe entry that cannot work: `field` of the recipe, `problem`, `fix`."""

    def __init__(self, field: str, problem: str, fix: str):
        super().__init__(f"{field}: {problem}; {fix}")
        self.field, self.problem, self.fix = field, problem, fix


def prediction_of(trajectory: Trajectory) -> str:
    """Text of the last assistant message; never a tool's output. Empty when the model said nothing."""
    for message in reversed(trajectory.messages):
        if message["role"] == "assistant":
            return text_of(message.get("content") or "")
    return ""


@dataclass(frozen=True)
class _Entry:
    """One reward as the recipe has it; `label` is the recipe's field."""

    label: str
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    weight: float = 1.0
    timeout_seconds: float = _SECONDS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> bool:
        return getattr(self.function, "is_group_reward", False)

    @property
    def offered(self) -> tuple[str, ...]:
        return GROUP_OFFERED if self.group else OFFERED

    @property
    def takes_row(self) -> bool:
        return _takes_row(self.parameters)

    async def ask(self, offered: dict[str, Any], task: Task) -> Any:
        """What the function returns. Raises RewardError where it raises or takes too long."""
        given = {**task, **self.options, **offered}
        wanted = {
            name: value
            for name, value in given.items()
            if name in self.parameters or (self.takes_row and name not in offered)
        }
        limit = asyncio.timeout(self.timeout_seconds)
        try:
            async with limit:
                return await _run(partial(self.function, **wanted))
        except Exception as error:  # boundary: a user's reward may raise anything
            if limit.expired():
                raise RewardError(
                    f"{self.name} took longer than {self.label}.timeout_seconds={self.timeout_seconds:g}"
                ) from None
            if isinstance(error, RewardError):
                raise RewardError(f"{self.name}: {error}") from error
            raise RewardError(f"{self.name} raised {type(error).__name__}: {error}") from error

    def parse(self, verdict: Any, trajectory: Trajectory) -> EnvironmentReward:
        """Raises TypeError or ValueError where the verdict is none of this chain."""
        parsed = EnvironmentReward.parse(verdict, self.name)
        _check_turns(parsed, trajectory, self.name)
        return parsed


class Rewards:
    """Several rewards, weighted and added up. Without any, the environment's own reward counts.

    Where there are several, the value of each, before its weight, is a metric of the chain: `reward/<name>`. Two
    rewards may not give metrics of one name; one may replace a metric of the environment.

    As an async context manager it closes at its end what the rewards hold.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]] = ()):
        """Of Python callables, marked or not, each with weight 1. Raises InvalidReward where two have one name."""
        self._use([_entry(RewardConfig(reward=_name(f)), f"rewards.{i}", _name(f), f) for i, f in enumerate(functions)])

    @classmethod
    def load(cls, rewards: Sequence[RewardConfig], base: Path) -> Self:
        """Load prebuilt rewards and `FILE.py:NAME` references (paths relative to `base`), which must carry `@reward`.

        Raises InvalidReward where there is no such reward, its options are not those it takes, or two have one name.
        """
        loaded = cls()
        loaded._use([_load(config, f"rewards.{i}", base) for i, config in enumerate(rewards)])
        return loaded

    def _use(self, entries: list[_Entry]) -> None:
        for index, entry in enumerate(entries):
            for other in entries[:index]:
                if other.name == entry.name:
                    problem = f"{other.label} is called {entry.name!r} too, and metrics are told apart by name"
                    raise InvalidReward(entry.label, problem, f"give one of them another name, as {entry.label}.name")
        self._entries = entries
        self._giver_of_metric: dict[str, str] = {}

    @property
    def has_group_rewards(self) -> bool:
        """Whether a reward judges the chains of a group together."""
        return any(entry.group for entry in self._entries)

    def check(self, task: Task) -> None:
        """Raise InvalidReward where a reward wants a field that `task` does not have, or has under a name that rewards
        know as something else."""
        for entry in self._entries:
            for parameter in entry.parameters.values():
                if parameter.name in entry.offered and parameter.name in task:
                    raise InvalidReward(
                        entry.label,
                        f"{entry.name} takes {parameter.name!r}, which is also a field of the data",
                        f"give the field another name by data.columns, such as {{row_{parameter.name}: "
                        f"{parameter.name}}}",
                    )
                required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
                if required and parameter.name not in (*entry.offered, *entry.options, *task):
                    raise InvalidReward(
                        entry.label,
                        f"{entry.name} wants {parameter.name!r}, which is neither one of {', '.join(entry.offered)} "
                        f"nor a field of the data ({', '.join(task)})",
                        "give it as one of the entry's options, or rename a field by data.columns",
                    )
            if own_check := getattr(entry.function, "check", None):
                try:
                    own_check(task)
                except ValueError as error:
                    fix = "change the entry's options, or rename a field by data.columns"
                    raise InvalidReward(entry.label, f"{entry.name} {error}", fix) from error

    async def score(
        self, trajectory: Trajectory, task: Task, environment: EnvironmentReward | None
    ) -> EnvironmentReward:
        """Weighted sum of the chain's rewards, those of each turn too, and their metrics. Group rewards are not in it;
        where there are no others it is 0.

        Raises RewardError where a reward raises or takes too long, TypeError where what it returns is no reward,
        ValueError where it gives turn rewards for more or fewer turns than the chain has, or another's metric.
        """
        if not self._entries:
            if environment is None:
                raise ValueError("no reward: the recipe names no rewards and no environment gives one")
            _check_turns(environment, trajectory, "the environment")
            return environment
        prediction = prediction_of(trajectory)
        offered = dict(zip(OFFERED, (prediction, prediction, trajectory, environment), strict=True))
        total = EnvironmentReward(0.0, dict(environment.metrics) if environment else {})
        for entry in self._entries:
            if not entry.group:
                total.add(self._weighted(entry, entry.parse(await entry.ask(offered, task), trajectory)))
        return total

    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
        """Add the group rewards to the rewards and metrics of those of a task's chains that have a reward.

        Where a group reward fails, whichever way, these chains end as reward_error, and none has a reward.
        """
        members = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if not members or not self.has_group_rewards:
            return
        try:
            totals = await self._judge_together(members, task)
        except Exception as error:  # boundary: user code
            logger.exception("a group reward failed for chains %s", ", ".join(member.id for member in members))
            for member in members:
                member.outcome, member.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                member.reward = member.turn_rewards = None
            return
        for member, total in zip(members, totals, strict=True):
            member.reward, member.turn_rewards = total.reward, total.turn_rewards
            member.metrics |= total.metrics

    async def _judge_together(self, members: list[Trajectory], task: Task) -> list[EnvironmentReward]:
        """What each member has by now, and what the group rewards add to it."""
        offered = dict(zip(GROUP_OFFERED, ([prediction_of(member) for member in members], members), strict=True))
        totals = [EnvironmentReward(member.reward or 0.0, {}, member.turn_rewards) for member in members]
        for entry in self._entries:
            if not entry.group:
                continue
            verdicts = await entry.ask(offered, task)
            if isinstance(verdicts, (str, dict)) or not hasattr(verdicts, "__len__") or len(verdicts) != len(members):
                raise TypeError(
                    f"{entry.name} returned {verdicts!r}; it has to be a list with a number or dict for each of the "
                    f"{len(members)} chains"
                )
            for member, total, verdict in zip(members, totals, verdicts, strict=True):
                total.add(self._weighted(entry, entry.parse(verdict, member)))
        return totals

    def _weighted(self, entry: _Entry, verdict: EnvironmentReward) -> EnvironmentReward:
        for metric in verdict.metrics:
            giver = self._giver_of_metric.setdefault(metric, entry.name)
            if giver != entry.name:
                raise ValueError(f"{giver} and {entry.name} both give the metric {metric!r}; rename it in one of them")
        alone = {} if len(self._entries) == 1 else {f"reward/{entry.name}": verdict.reward}
        turns = verdict.turn_rewards
        return EnvironmentReward(
            entry.weight * verdict.reward,
            verdict.metrics | alone,
            None if turns is None else [entry.weight * turn for turn in turns],
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for entry in self._entries:
            if close := getattr(entry.function, "close", None):
                try:
                    await _run(close)
                except Exception:  # boundary: user code
                    logger.exception("closing the reward %s failed", entry.name)


def _load(config: RewardConfig, label: str, base: Path) -> _Entry:
    try:
        loaded = load_object(config.reward, base, PREBUILT)
    except UserCodeError as error:
        fix = "name a prebuilt reward, or what a file defines, as FILE.py:NAME"
        raise InvalidReward(label, f"unknown: {error}", fix) from error
    if not getattr(loaded, "is_reward", False):
        raise InvalidReward(label, f"{config.reward} is not a reward", "put @reward above its definition")
    name = config.name or config.reward.rpartition(":")[2]
    if not inspect.isclass(loaded):
        return _entry(config, label, name, loaded)
    known = inspect.signature(loaded).parameters
    _check_options(config.options, known, label, name)
    try:
        made: Any = loaded(**config.options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (label, "options", *first["loc"])))
        got = f"got {first['input']!r}: " if first["loc"] and first["type"] != "missing" else ""
        problem = got + first["msg"].removeprefix("Value error, ")
        raise InvalidReward(place, problem, f"{name} is described in docs/rewards.md") from error
    except Exception as error:  # boundary: user code
        problem = f"{name} could not be made: {type(error).__name__}: {error}"
        raise InvalidReward(f"{label}.options", problem, f"it takes {', '.join(known) or 'none'}") from error
    return _entry(config.model_copy(update={"options": {}}), label, name, made)


def _entry(config: RewardConfig, label: str, name: str, function: Callable[..., Any]) -> _Entry:
    parameters = parameters_of(function, name)
    _check_options(config.options, parameters, label, name)
    return _Entry(label, name, function, parameters, config.weight, config.timeout_seconds, config.options)


def _check_options(options: dict[str, Any], known: Mapping[str, inspect.Parameter], label: str, name: str) -> None:
    for option in options:
        if option in (*OFFERED, *GROUP_OFFERED):
            problem = f"{name} gets {option!r} from the chain"
            raise InvalidReward(f"{label}.options.{option}", problem, "remove it, or give the parameter another name")
        if option not in known and not _takes_row(known):
            takes = [parameter for parameter in known if parameter not in (*OFFERED, *GROUP_OFFERED)]
            raise InvalidReward(
                f"{label}.options.{option}", f"{name} has no such option", f"it takes {', '.join(takes) or 'none'}"
            )


def _takes_row(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _run(function: Callable[[], Any]) -> Any:
    called = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None)):  # noqa: B004
        return await function()
    result = await run_in_thread(function)
    return await result if inspect.isawaitable(result) else result


def _check_turns(scored: EnvironmentReward, trajectory: Trajectory, name: str) -> None:
    if scored.turn_rewards is not None and len(scored.turn_rewards) != trajectory.turns:
        raise ValueError(
            f"{name} gave {len(scored.turn_rewards)} turn_rewards, and the chain has {trajectory.turns} assistant turns"
        )
