"""`Environment`: a world with state that one chain acts on."""

import inspect
from typing import Any


class Environment:
    """Base of stateful worlds. A chain has an instance to itself; the next chain gets it after `release`.

    A subclass marks with `@tool` what the model may call, and overrides what it needs of the methods below. All of
    them, and the constructor's parameters (`options` in a recipe), are the subclass's own. Methods may be plain
    (`def`: run in a thread, may block) or `async def` (run on the event loop: cheaper, must not block); the
    constructor runs in a thread. Calls to one instance never overlap.

    What costs time and is the same for every task belongs into the constructor; what belongs to one task into `reset`.
    An instance whose `reset` or `release` failed is replaced. A class that overrides neither of the two could not
    forget anything: each chain gets a new instance.
    """

    def reset(self, *args: Any, **task: Any) -> Any:
        """Begin the chain's task. Declare the fields of the data row that you need, or `**task` for all of them.

        Returns what opens the chain, a text or an image or anything else that a tool may return, or None.
        """
        return None

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Judge the finished chain: a number, or a dict with `reward` and further numbers, such as `success`.

        `turn_rewards` in it is a list: what each assistant turn earned by itself, beside the whole chain's `reward`.
        A class without it leaves the judgement to the recipe's `rewards:`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reward(): define one, or give the recipe `rewards:`")

    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the chain, which has ended or failed: called once for each, before another chain's `reset`."""
        return None

    def healthy(self, *args: Any, **kwargs: Any) -> Any:
        """Whether the instance can serve another chain; one that says False is closed and replaced."""
        return True

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Let go of what the instance holds. Called once, when no further chain will get it."""
        return None


def reset_schema(environment: type[Environment]) -> dict[str, Any]:
    """JSON schema of the task fields that reset() takes; any JSON value goes, because rows hold any."""
    parameters = list(inspect.signature(environment.reset).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "type": "object",
        "properties": {p.name: {} for p in named},
        "required": [p.name for p in named if p.default is p.empty],
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }
