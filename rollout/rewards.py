"""Rewards by decorator: `@reward` functions take by name what they need and return a number, or a dict."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.config import RewardConfig
from rollout.data import Task
from rollout.trajectory import Trajectory
from tools.messages import EnvironmentReward
from tools.user_code import load_object

OFFERED = ("prediction", "trajectory", "environment")


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as a reward.

    Its parameters are filled by name: `prediction` (text of the last assistant message), `trajectory`
    (the `Trajectory`), `environment` (what the environment says of the chain, an `EnvironmentReward` or None), and any
    field of the task's row. It returns a number, or a dict with `reward` and further numbers, which become metrics
    (`success` is one that progress and evaluation report, and that `rollout.curriculum` goes by). Sync or async.

    `turn_rewards` in the dict is a list: what each assistant turn of the chain (`trajectory.turns` of them) earned by
    itself. These are credited to their turns, beside `reward`, which is for the chain as a whole.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"@reward {function.__name__}: parameter {parameter.name!r} cannot be filled by name; "
                "use ordinary parameters, or **fields for the whole row"
            )
    function.is_reward = True  # type: ignore[attr-defined]
    return function


def prediction_of(trajectory: Trajectory) -> str:
    """Text of the last assistant message; never a tool's output. Empty when the model said nothing."""
    for message in reversed(trajectory.messages):
        if message["role"] == "assistant":
            return message.get("content") or ""
    return ""


class Rewards:
    """The recipe's rewards, summed. Without any, the environment's own reward counts."""

    def __init__(self, functions: list[Callable[..., Any]]):
        self.functions = functions

    @classmethod
    def load(cls, rewards: list[RewardConfig], base: Path) -> "Rewards":
        """Load `FILE.py:NAME` references; each must carry `@reward`."""
        functions = []
        for entry in rewards:
            reference = entry.reward
            function = load_object(reference, base)
            if not getattr(function, "is_reward", False):
                raise ValueError(f"rewards: {reference} is not a reward; put @reward above its definition")
            functions.append(function)
        return cls(functions)

    def check(self, task: Task) -> None:
        """Raise ValueError where a reward wants a field that `task` does not have."""
        for function in self.functions:
            for parameter in inspect.signature(function).parameters.values():
                required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
                if required and parameter.name not in (*OFFERED, *task):
                    raise ValueError(
                        f"rewards: {function.__name__} wants {parameter.name!r}, which is neither one of "
                        f"{', '.join(OFFERED)} nor a field of the data ({', '.join(task)})"
                    )

    async def score(
        self, trajectory: Trajectory, task: Task, environment: EnvironmentReward | None
    ) -> EnvironmentReward:
        """Sum of the rewards, those of each turn too, and their metrics.

        Raises ValueError where there are turn rewards for more or fewer turns than the chain has. Whatever a user's
        function raises propagates.
        """
        if not self.functions:
            if environment is None:
                raise ValueError("no reward: the recipe names no rewards and no environment gives one")
            _check_turns(environment, trajectory, "the environment")
            return environment
        offered = {
            **task,
            "prediction": prediction_of(trajectory),
            "trajectory": trajectory,
            "environment": environment,
        }
        total = EnvironmentReward(0.0, dict(environment.metrics) if environment else {})
        for function in self.functions:
            result = function(**_wanted(function, offered))
            if inspect.isawaitable(result):
                result = await result
            one = EnvironmentReward.parse(result, function.__name__)
            _check_turns(one, trajectory, function.__name__)
            total.add(one)
        return total


def _check_turns(scored: EnvironmentReward, trajectory: Trajectory, name: str) -> None:
    if scored.turn_rewards is not None and len(scored.turn_rewards) != trajectory.turns:
        raise ValueError(
            f"{name} gave {len(scored.turn_rewards)} turn_rewards, and the chain has {trajectory.turns} assistant turns"
        )


def _wanted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}
