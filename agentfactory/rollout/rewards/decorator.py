"""The decorator `@reward`, for functions and classes that score chains."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

Judge = TypeVar("Judge", bound=Callable[..., Any])


@overload
def reward(given: Judge) -> Judge: ...
@overload
def reward(*, group: bool) -> Callable[[Judge], Judge]: ...
def reward(given: Judge | None = None, *, group: bool = False) -> Judge | Callable[[Judge], Judge]:
    """Mark a function as a reward. It can be sync (it then runs in threads, several calls concurrently) or async.

    Its parameters are filled by name:

    - `prediction` or `final_response`: text of the last assistant message
    - `trajectory`: the `Trajectory`
    - `environment`: the environment's own reward for the chain, an `EnvironmentReward` or None
    - `seen_images`: paths of the images in the trajectory's messages, in order, in the size that the model got
    - `model_view`: the model's coordinate system in images, a `ModelView`, which converts to pixels of the files
    - `workspace`: path of the folder in which the chain's program worked (`rollout.agent: {command: [...]}`), or None
    - any of the recipe entry's `options`, and any field of the task's row; `**row` takes the rest of both

    It returns a number (of Python, numpy or torch), or a dict with `reward` and further numbers, which become metrics
    (`success` is reported in progress and evaluation, and used by `rollout.curriculum`).

    `turn_rewards` in the dict is a list with a separate reward for each assistant turn of the chain
    (`trajectory.turns` of them). These are credited to their turns, in addition to `reward`, which is for the whole
    chain.

    `@reward(group=True)` marks a function that scores the chains of a task together: it takes `predictions` and
    `trajectories`, lists over the chains that have a reward (`trajectory.reward` is the reward so far), options and
    fields. It returns a list with a number or dict for each chain, which is added to the chain's reward.

    A class is instantiated once, with the entry's options as arguments, and its `__call__` is the reward. It can have
    two optional methods: `check(row)` is called with the tasks before the run, and raises ValueError if it cannot score
    such rows; `close()` is called at the end.

    Raise TypeError if a parameter cannot be filled by name.
    """

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
            raise TypeError(
                f"@reward {name}: parameter {parameter.name!r} cannot be filled by name; "
                "use ordinary parameters, or **row for the whole row"
            )
    return parameters
