"""The decorator `@reward`, and the loading and calling of an entry of the recipe's `rewards:`."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward, own_copy
from agentfactory.base.processes.threads import run_in_thread, run_on_loop
from agentfactory.base.user_code.entry_points import REWARDS, registered
from agentfactory.base.user_code.loading import load_for
from agentfactory.base.user_code.options import check_options, instantiate, takes_row
from agentfactory.rollout.config import RewardConfig
from agentfactory.rollout.data import Task
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.calls.limits import Deadline

PREBUILT = {
    "exact_match": "agentfactory.rollout.rewards.answers:ExactMatch",
    "f1": "agentfactory.rollout.rewards.answers:F1",
    "math_equal": "agentfactory.rollout.rewards.math_equal:MathEqual",
    "anls": "agentfactory.rollout.rewards.answers:Anls",
    "relaxed_accuracy": "agentfactory.rollout.rewards.answers:RelaxedAccuracy",
    "multiple_choice": "agentfactory.rollout.rewards.answers:MultipleChoice",
    "count": "agentfactory.rollout.rewards.answers:Count",
    "box_iou": "agentfactory.rollout.rewards.boxes_and_points:BoxIou",
    "point_in_box": "agentfactory.rollout.rewards.boxes_and_points:PointInBox",
    "code_tests": "agentfactory.rollout.rewards.code_tests:CodeTests",
    "format": "agentfactory.rollout.rewards.form_and_length:Format",
    "length": "agentfactory.rollout.rewards.form_and_length:Length",
    "judge": "agentfactory.people.judges.judge:Judge",
    "rubric": "agentfactory.people.judges.rubric:Rubric",
    "pairwise": "agentfactory.people.judges.pairwise:Pairwise",
}
"""The prebuilt rewards: name -> `package.module:NAME`, loaded on first use."""

OFFERED = ("prediction", "final_response", "trajectory", "environment", "seen_images", "model_view", "workspace")
GROUP_OFFERED = ("predictions", "trajectories")
_FROM_CHAIN = (*OFFERED, *GROUP_OFFERED)


class RewardError(Exception):
    """A failure of a reward: an exception, a timeout, or a chain that it cannot score; not the policy's."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward of the recipe; `label` is the recipe's field."""

    label: str
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    weight: float
    timeout_seconds: float
    options: dict[str, Any]

    @property
    def group(self) -> bool:
        return getattr(self.function, "is_group_reward", False)

    @property
    def offered(self) -> tuple[str, ...]:
        """The parameter names that are filled from the chain, not from options or data."""
        return GROUP_OFFERED if self.group else OFFERED

    @property
    def limit(self) -> str:
        """The setting of its time limit, with the value."""
        return f"{self.label}.timeout_seconds={self.timeout_seconds:g}"

    async def ask(self, offered: dict[str, Any], task: Task, limit: Deadline | None = None) -> Any:
        """Call the function on copies of arguments. Raise RewardError if it raises, or exceeds its time or `limit`."""
        rest = {**task, **self.options}
        given = {**rest, **offered}
        names = {*self.parameters, *(rest.keys() - offered if takes_row(self.parameters) else ())}
        wanted = {name: value for name, value in given.items() if name in names}
        own = Deadline.after(self.timeout_seconds, f"{self.label}.timeout_seconds")
        first = own if limit is None or own.until < limit.until else limit
        timer = asyncio.timeout_at(first.until)
        try:
            async with timer:
                # other rewards, the task's other chains and the saved group share them
                copies = own_copy(wanted)
                if "trajectory" in copies:
                    copies["trajectory"] = copies["trajectory"].copied()
                if "trajectories" in copies:
                    copies["trajectories"] = [trajectory.copied() for trajectory in copies["trajectories"]]
                return await run(partial(self.function, **copies))
        except Exception as error:  # boundary: a user's reward may raise anything
            if timer.expired():
                raise RewardError(f"{self.name} took longer than {first.setting}") from None
            what = ":" if isinstance(error, RewardError) else f" raised {type(error).__name__}:"
            raise RewardError(f"{self.name}{what} {error}") from error

    def parse_group(self, verdicts: Any, chains: int) -> Sequence[Any]:
        """Return a group reward's results, one per chain. Raise TypeError if their number differs."""
        if isinstance(verdicts, (str, dict)) or not hasattr(verdicts, "__len__") or len(verdicts) != chains:
            form = f"a list with a number or dict for each of the {chains} chains"
            raise TypeError(f"{self.name} returned {verdicts!r}; it must return {form}")
        return verdicts  # type: ignore[no-any-return]

    def parse(self, verdict: Any, trajectory: Trajectory) -> EnvironmentReward:
        """Convert the function's result. Raise TypeError or ValueError if it is not valid for this chain."""
        parsed = EnvironmentReward.parse(verdict, self.name)
        check_turns(parsed, trajectory, self.name)
        return parsed


def load_reward(given: Callable[..., Any] | RewardConfig | str, label: str, base: Path) -> RewardSpec:
    """Load a callable, marked or not, or a reward named by a recipe. Raise SettingError if it cannot be used."""
    if not isinstance(given, (RewardConfig, str)):
        name = getattr(given, "__name__", type(given).__name__)
        return _made(given, RewardConfig(reward=name), label, name)
    config = RewardConfig(reward=given) if isinstance(given, str) else given
    loaded = load_for(label, config.reward, base, {**registered(REWARDS), **PREBUILT})
    if not getattr(loaded, "is_reward", False):
        raise SettingError(label, f"{config.reward} is not a reward", "put @reward above its definition")
    return _made(loaded, config, label, config.reward.rpartition(":")[2])


def _made(given: Any, config: RewardConfig, label: str, name: str) -> RewardSpec:
    options = config.options
    if inspect.isclass(given):
        given, options = instantiate(given, options, label, name, _FROM_CHAIN), {}
    parameters = parameters_of(given, name)
    check_options(options, parameters, label, name, _FROM_CHAIN)
    return RewardSpec(label, name, given, parameters, config.weight, config.timeout_seconds, options)


async def run(function: Callable[[], Any]) -> Any:
    """Call a user's function: on the event loop if it is async, otherwise in a thread."""
    called = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None)):  # noqa: B004
        return await run_on_loop(function())
    result = await run_in_thread(function)
    return await run_on_loop(result) if inspect.isawaitable(result) else result


def check_turns(scored: EnvironmentReward, trajectory: Trajectory, name: str) -> None:
    """Raise ValueError if the number of turn rewards differs from the chain's number of turns."""
    if scored.turn_rewards is not None and len(scored.turn_rewards) != trajectory.turns:
        turns = f"{trajectory.turns} assistant turns"
        raise ValueError(f"{name} gave {len(scored.turn_rewards)} turn_rewards, but the chain has {turns}")


Judge = TypeVar("Judge", bound=Callable[..., Any])


@overload
def reward(given: Judge) -> Judge: ...
@overload
def reward(*, group: bool) -> Callable[[Judge], Judge]: ...
def reward(given: Judge | None = None, *, group: bool = False) -> Judge | Callable[[Judge], Judge]:
    """Mark a function, async or sync (it then runs in threads, several calls concurrently), as a reward. Its parameters
    are filled by name:

    - `prediction` or `final_response`: text of the last assistant message
    - `trajectory`: the `Trajectory`
    - `environment`: the environment's own reward for the chain, an `EnvironmentReward` or None
    - `seen_images`: paths of the images in the trajectory's messages, in order, in the size that the model got
    - `model_view`: the model's coordinate system in images, a `ModelView`, which converts to pixels of the files
    - `workspace`: path of the folder in which the chain's program worked (`rollout.agent: {command: [...]}`), or None
    - any of the recipe entry's `options`, and any field of the task's row; `**row` takes the rest of both

    It returns a number (of Python, numpy or torch), or a dict with `reward` and further numbers, which become metrics
    (`success` is reported in progress and evaluation, and used by `rollout.curriculum`). `turn_rewards` in the dict is
    a list of `trajectory.turns` rewards, credited to the assistant turns in addition to `reward` for the whole chain.

    `@reward(group=True)` marks a function that scores the chains of a task together: it takes `predictions` and
    `trajectories`, lists over the chains that have a reward (`trajectory.reward` is the reward so far), options and
    fields. It returns a list with a number or dict for each chain, which is added to the chain's reward.

    A class is instantiated once, with the entry's options as arguments, and its `__call__` is the reward. It can have
    two methods: `check(row)` is called with the tasks before the run, and raises ValueError if it cannot score such
    rows; `close()` is called at the end. Raise TypeError if a parameter cannot be filled by name."""

    def mark(judge: Judge) -> Judge:
        parameters_of(judge.__call__ if inspect.isclass(judge) else judge, judge.__name__)
        judge.is_reward = True  # type: ignore[attr-defined]
        judge.is_group_reward = group  # type: ignore[attr-defined]
        return judge

    return mark if given is None else mark(given)


def parameters_of(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a reward. Raise TypeError if one cannot be filled by name."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            problem = f"@reward {name}: parameter {parameter.name!r} cannot be filled by name"
            raise TypeError(f"{problem}; use ordinary parameters, or **row for the whole row")
    return parameters
