"""`Environment`: a stateful world that one chain acts on, and the anchors that identify its states."""

import inspect
import json
from hashlib import blake2b
from typing import Any, ClassVar


class Environment:
    """Base of stateful worlds. A chain has an instance exclusively; the next chain gets it after `release`.

    A subclass marks the methods that the model may call with `@tool`, and overrides the methods below as needed. The
    signatures of all methods, and the constructor's parameters (`options` in a recipe), are up to the subclass. Methods
    may be plain (`def`: run in a thread, may block) or `async def` (run on the event loop: cheaper, must not block);
    the constructor runs in a thread. Calls to one instance never overlap.

    Put expensive work that is the same for every task in the constructor, and the work for one task in `reset`. An
    instance whose `reset` or `release` failed is replaced. A class that overrides neither method cannot forget a chain,
    so each chain gets a new instance.
    """

    sandboxed: ClassVar[bool] = False
    """True: it runs code in sandboxes, and `doctor` checks that one starts."""

    @classmethod
    def check_machine(cls, *args: Any, **options: Any) -> None:
        """Raise SettingError if the machine lacks what every instance needs, such as a program, and say how to install
        it; or if one of the constructor's `options` cannot work, with its name as the error's `field`. Called when a
        recipe is loaded, before anything starts. Declare the options that you need, or `**options` for all of them."""

    def reset(self, *args: Any, **task: Any) -> Any:
        """Begin the chain's task. Declare the fields of the data row that you need, or `**task` for all of them.

        Returns what opens the chain: a text, an image or anything else that a tool may return, or None.
        """
        return None

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Judge the finished chain: return a number, or a dict with `reward` and further numbers, such as `success`.

        `turn_rewards` in the dict is a list with the separate reward of each assistant turn, in addition to the whole
        chain's `reward`. If a class does not define this method, the recipe's `rewards:` judge the chain.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reward(): define one, or give the recipe `rewards:`")

    def anchor(self) -> Any:
        """Return what identifies the state that the chain is in, such as a position: a text, a number, or lists, tuples
        and dicts of them. None: this state is to be compared with no other.

        Turns of a task's chains that begin at equal anchors are compared with each other by the estimator `gigpo`.
        Called after `reset` and after each tool; a plain method, which must not block.
        """
        return None

    def take_images(self, images: list[str]) -> Any:
        """Take the images that other tools have shown in the chain, as `data:` addresses in their order. Return a list
        with what the model reads before each of them, which may be empty. Called after each turn, if the class defines
        this method and there are any."""
        raise NotImplementedError

    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the chain, which has ended or failed. Called once for each chain, before another chain's `reset`."""
        return None

    def healthy(self, *args: Any, **kwargs: Any) -> Any:
        """Return whether the instance can serve another chain; if not, it is closed and replaced."""
        return True

    def gauges(self) -> dict[str, float]:
        """Return numbers to be logged, by name, in addition to those of the pool: of what all instances of a process
        share, such as the hits of a cache since the start. Any instance is asked. Numbers of workers are added up."""
        return {}

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Release the instance's resources. Called once, when no further chain will get it."""
        return None


def gives_anchors(environment: type[Environment]) -> bool:
    """Return whether the class says in which state a chain is."""
    return environment.anchor is not Environment.anchor


def takes_images(environment: type[Environment]) -> bool:
    """Return whether the class wants the images of other tools."""
    return environment.take_images is not Environment.take_images


def check_machine_for(environment: type[Environment], options: dict[str, Any]) -> None:
    """Call the class's `check_machine` with those of the options that it declares."""
    parameters = inspect.signature(environment.check_machine).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    declared = options.keys() if takes_all else options.keys() & {parameter.name for parameter in parameters}
    environment.check_machine(**{name: options[name] for name in declared})


def reset_schema(environment: type[Environment]) -> dict[str, Any]:
    """Return the JSON schema of the task fields that reset() takes; any JSON value is allowed, because rows may contain
    any."""
    parameters = list(inspect.signature(environment.reset).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "type": "object",
        "properties": {p.name: {} for p in named},
        "required": [p.name for p in named if p.default is p.empty],
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


ANCHOR_KEY = "agentfactory/anchor"
"""Key in a result's `_meta`: the anchor of the state after the call, any JSON; false if it has none (null would not
reach the other side). A result without the key leaves the anchor as it was."""

_LONGEST = 80
"""Characters of an anchor that trajectories keep; a longer one becomes a digest."""


def anchor_text(anchor: Any) -> str | None:
    """Return an anchor as text: a text stays as it is, anything else becomes its JSON; a long text becomes a digest.
    None stays None. Equal anchors give equal texts.

    Raises TypeError or ValueError if JSON cannot hold it, such as a set, whose order is not fixed.
    """
    if anchor is None:
        return None
    text = anchor if isinstance(anchor, str) else json.dumps(anchor, sort_keys=True, ensure_ascii=False, default=_plain)
    if len(text) <= _LONGEST:
        # as a file in UTF-8 can hold it
        return text.encode("utf-8", "replace").decode()
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Convert arrays and scalars of numpy and torch to Python's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")
