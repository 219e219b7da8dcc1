"""`Environment`: a stateful world that one chain acts on, and the anchors that identify its states."""

import inspect
import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, ClassVar, TypeGuard

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec
from agentfactory.base.user_code.watch import announced


class Environment:
    """Base of stateful worlds. An instance serves one chain at a time; the next chain gets it after `release`. A
    subclass marks tools with `@tool`, and overrides methods below, whose signatures and the constructor's (`options` in
    a recipe) are up to it. Methods may be plain (`def`: run in a thread, may block) or `async def` (on the event loop);
    calls never overlap. Put work that is the same for every task into the constructor. An instance whose `reset` or
    `release` failed is replaced; a class without both gets a new instance per chain."""

    sandboxed: ClassVar[bool] = False
    """True if it runs code in sandboxes; `doctor` then checks that one starts."""

    @classmethod
    def check_machine(cls, *args: Any, **options: Any) -> None:
        """Raise SettingError if the machine lacks a requirement of every instance, such as a program (say how to
        install it), or if a constructor option is invalid (put its name into the error's `field`). Called when a recipe
        is loaded, before anything starts. Declare the options that you need, or `**options` for all of them."""

    @classmethod
    def check_data_row(cls, row: dict[str, Any], has_rewards: bool) -> None:
        """Raise ValueError, with the wrong field and the fix, if `reset` would refuse a data row, or if its chains
        would always earn the same. `has_rewards`: the recipe's `rewards:` judge the chains, and `reward` does not.
        Called for every row before the first chain."""

    @classmethod
    def further_tools(cls, *args: Any, **options: Any) -> Sequence[ToolSpec]:
        """Return the tools that only the constructor's options determine, such as those of another engine, next to
        those marked by `@tool`. Called once for a recipe, with all options."""
        return ()

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call one of `further_tools`; its arguments are not checked. Return what a tool may return."""
        raise NotImplementedError(f"{type(self).__name__} has further_tools(), and no call_tool()")

    def reset(self, *args: Any, **task: Any) -> Any:
        """Begin the chain's task. Declare the fields of the data row that you need, or `**task` for all of them.

        Returns the chain's opening: a text, an image or anything else that a tool may return, or None."""
        return None

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Judge the finished chain: return a number, or a dict with `reward`, further numbers, such as `success`, and
        possibly `turn_rewards`, a list with a reward per assistant turn. Declare `prediction` for the text of the
        chain's last assistant message. Without this method, the recipe's `rewards:` judge the chain."""
        raise NotImplementedError(f"{type(self).__name__} has no reward(): define one, or give the recipe `rewards:`")

    def anchor(self) -> Any:
        """Return an identifier of the chain's current state, for the estimator `gigpo`: a text, a number, or lists,
        tuples and dicts of them; None: compare it with no other. Called after `reset` and each tool; must not block."""
        return None

    def take_images(self, images: list[str]) -> Any:
        """Take the new images from other tools after a turn, as `data:` URLs; return a list with a text to insert
        before each, which may be empty. Called if the class defines it."""
        raise NotImplementedError

    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the chain, which has ended or failed. Called once for each chain, before another chain's `reset`."""
        return None

    def healthy(self, *args: Any, **kwargs: Any) -> Any:
        """Return whether the instance can serve another chain; if not, it is closed and replaced."""
        return True

    def gauges(self) -> dict[str, float]:
        """Return numbers to log, by name, about what all instances of a process share, such as cache hits."""
        return {}

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Release the instance's resources. Called once, when no further chain will get it."""
        return None


def reward_schema(environment: type[Environment]) -> dict[str, Any]:
    """Return the JSON schema of reward()'s arguments. Raise TypeError if it needs one that it cannot get."""
    parameters = list(inspect.signature(environment.reward).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [name for name in needed if name != "prediction"]:
        raise TypeError(f"{environment.__name__}.reward takes {unknown[0]!r}; it can take only `prediction`")
    takes = any(parameter.name == "prediction" for parameter in parameters)
    properties = {"prediction": {"type": "string"}} if takes else {}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def is_environment(found: Any) -> TypeGuard[type[Environment]]:
    return isinstance(found, type) and issubclass(found, Environment)


def overrides(environment: type[Environment], method: str) -> bool:
    """Return whether the class defines this method of Environment itself."""
    return getattr(environment, method) is not getattr(Environment, method)


def check_machine_for(environment: type[Environment], options: dict[str, Any]) -> None:
    """Call the class's `check_machine` with the options that it declares."""
    parameters = inspect.signature(environment.check_machine).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    declared = options.keys() if takes_all else options.keys() & {parameter.name for parameter in parameters}
    with announced(f"checking this machine by {environment.__name__}.check_machine"):
        environment.check_machine(**{name: options[name] for name in declared})


def check_data_rows(
    environment: type[Environment], rows: Sequence[dict[str, Any]], section: str, has_rewards: bool
) -> None:
    """Call the class's `check_data_row` for the rows of `section`. Raises SettingError with the number of the row."""
    with announced(f"checking the rows of {section} by {environment.__name__}.check_data_row"):
        for number, row in enumerate(rows, 1):
            try:
                environment.check_data_row(row, has_rewards)
            except ValueError as error:
                raise SettingError(section, f"row {number}: {error}", "correct it, or leave the row out") from error


def reset_schema(environment: type[Environment]) -> dict[str, Any]:
    """Return the JSON schema of the task fields that reset() takes. Rows may contain any JSON value."""
    parameters = list(inspect.signature(environment.reset).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "type": "object",
        "properties": {p.name: {} for p in named},
        "required": [p.name for p in named if p.default is p.empty],
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


ANCHOR_KEY = "agentfactory/anchor"
"""Key in a result's `_meta`: the anchor of the state after the call, any JSON; false if it has none (null would be
dropped on the way). A result without the key leaves the anchor unchanged."""

_LONGEST = 80
"""Maximum characters of an anchor in trajectories; a longer one becomes a digest."""


def anchor_text(anchor: Any) -> str | None:
    """Return an anchor as text, JSON, or a digest if long. Raises TypeError or ValueError if JSON cannot hold it."""
    if anchor is None:
        return None
    text = anchor if isinstance(anchor, str) else json.dumps(anchor, sort_keys=True, ensure_ascii=False, default=_plain)
    if len(text) <= _LONGEST:
        # lone surrogates cannot be written to a file in UTF-8
        return text.encode("utf-8", "replace").decode()
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")
