"""`Environment`: a world with state that one chain acts on."""

from typing import Any


class Environment:
    """Base of stateful worlds. Each chain gets its own instance, made without arguments; load in `reset`.

    A subclass marks with `@tool` what the model may call, and overrides the three methods below. All of them may be
    plain (`def`: run in a thread, may block) or `async def` (run on the event loop: cheaper, must not block). Calls
    to one instance never overlap.
    """

    def reset(self, *args: Any, **task: Any) -> Any:
        """Begin the chain's task. Declare the fields of the data row that you need, or `**task` for all of them.

        Returns a text that opens the chain, or None.
        """
        return None

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Judge the finished chain: a number, or a dict with `reward` and further numbers, such as `success`.

        `turn_rewards` in it is a list: what each assistant turn earned by itself, beside the whole chain's `reward`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reward(): define one, or give the recipe `rewards:`")

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Let go of what the instance holds. Called once, also when the chain failed."""
        return None
